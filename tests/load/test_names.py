"""Prefixes of a checkpoint's names that do not exist in the model."""

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration

from torch_marlin_metal import MarlinLinear, quantize_model
from torch_marlin_metal.load.names import shared_prefix

PLACES = {"block.up", "block.down"}
UP_DOWN = ("block.up", "block.down")
ONE = [f"text.{name}" for name in UP_DOWN]
CASES = {
    "all names": (ONE, ["text.norm"], "text.", "text."),
    "a part of the model": ([*ONE, "image.up"], ["image.norm"], "", "text."),
    "the other part fits in part": ([*ONE, "image.block.up", "image.block.fc"], [], "", "text."),
    "two parts fit": ([*ONE, "image.block.up"], [], "", ""),
    "a place without removal": ([*ONE, "block.up"], [], "", ""),
    "a further block": ([*ONE, "text.mtp"], [], "text.", "text."),
}


@pytest.mark.parametrize("case", CASES)
def test_a_beginning_is_removed_if_it_is_the_only_one(case) -> None:
    layers, others, whole, part = CASES[case]
    assert shared_prefix(layers, others, PLACES.__contains__) == whole
    assert shared_prefix(layers, others, PLACES.__contains__, in_part=True) == part


def test_the_text_model_of_a_model_for_images(tmp_path, caplog) -> None:
    """Without this package, transformers initializes all weights at random and only reports it."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 64, "num_key_value_heads": 1, "head_dim": 32}
    torch.manual_seed(0)
    vision = sizes | {"image_size": 28, "patch_size": 14}
    tokens = {f"{name}_token_index": 60 + i for i, name in enumerate(("boi", "eoi", "image"))}
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    ).eval()
    quantize_model(whole, "uint4b8", 32, progress=False)
    whole.save_pretrained(tmp_path)
    part = Gemma3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert sum(isinstance(module, MarlinLinear) for module in part.modules()) == 9
    assert "names begin with 'language_model.', which is removed" in caplog.text
    assert "vision_tower" in caplog.text
    ids = torch.tensor([[3, 9, 5]])
    with torch.no_grad():
        assert torch.equal(part(ids).logits, whole(ids).logits)
