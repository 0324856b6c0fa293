"""A packed table that several modules share is decoded and stored once, loads under each name, and stays tied."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5ForConditionalGeneration

from tests.integrations.test_packed_vocabulary import SHARED, logits, made
from tests.support.models import SIZES
from torch_marlin_metal import MarlinEmbedding, fuse_projections, quantize_model
from torch_marlin_metal.integrations.transformers import stored
from torch_marlin_metal.layers.fuse import FusedLinear


def packed(family: str) -> nn.Module:
    model = made(family)
    quantize_model(model, "uint4", 32, vocabulary_format="uint4", progress=False)
    return model


def test_the_decoded_table_is_one_tensor(tmp_path) -> None:
    packed("t5").save_pretrained(tmp_path)
    model = T5ForConditionalGeneration.from_pretrained(tmp_path)
    expected = logits(model)
    floats = model.dequantize()
    table = floats.shared.weight
    assert all(floats.get_submodule(name).weight is table for name in SHARED["t5"])
    torch.testing.assert_close(logits(floats), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("held", SHARED["t5"])
def test_a_file_may_name_any_of_the_tied_modules(held, tmp_path) -> None:
    model = packed("t5")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "shared.b_packed" in tensors
    new = {name: held + name.removeprefix("shared") if name.startswith("shared.") else name for name in tensors}
    save_file({new[name]: tensor for name, tensor in tensors.items()}, file, {"format": "pt"})
    settings = json.loads((tmp_path / "config.json").read_text())
    layers = settings["quantization_config"]["layers"]
    layers[held] = layers.pop("shared")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    again, info = T5ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    words = again.shared.b_packed
    assert all(again.get_submodule(name).b_packed is words for name in SHARED["t5"])
    assert torch.equal(logits(again), logits(model))


def test_columns_of_fused_layers_are_not_taken_for_shared_words(monkeypatch) -> None:
    """Each attribute access creates a new tensor, which may get the id of a tensor that was freed."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 4}, num_key_value_heads=2))
    quantize_model(model, "uint4", 32, progress=False)
    fuse_projections(model)
    monkeypatch.setattr(stored, "empty_model", lambda model: pytest.fail("a layer was taken for a shared one"))
    assert sum(isinstance(module, FusedLinear) for module in model.modules()) == 20
    assert len({name for name, _ in stored.stored_layers(model)}) == 30


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_tying_packed_tables_again(family, tmp_path) -> None:
    model, names = packed(family), SHARED[family]
    head = model.lm_head
    head.b_packed = head.b_packed.clone()
    model.tie_weights()
    words = model.get_input_embeddings().b_packed
    assert all(model.get_submodule(name).b_packed is words for name in names)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    again.tie_weights()
    assert again.lm_head.b_packed is again.get_input_embeddings().b_packed
    model.set_submodule("lm_head", nn.Linear(64, 64, bias=False))
    with pytest.raises(ValueError, match=r"tie_weights: 'lm_head' and '.*': expected two packed or two float layers"):
        model.tie_weights()


def test_packed_tables_keep_their_rows() -> None:
    model = packed("llama")
    before = model.model.embed_tokens
    for arguments in ({}, {"new_num_tokens": 64}, {"new_num_tokens": 60, "pad_to_multiple_of": 64}):
        assert model.resize_token_embeddings(**arguments) is before
    assert type(before) is MarlinEmbedding and model.lm_head.b_packed is before.b_packed
    message = r"resize_token_embeddings: LlamaForCausalLM: expected float input embeddings .* 64 rows, got .* 72 rows"
    with pytest.raises(ValueError, match=message):
        model.resize_token_embeddings(65, pad_to_multiple_of=8)
    assert model.model.embed_tokens is before and model.config.vocab_size == 64
