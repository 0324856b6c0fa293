"""TRL's SFTTrainer trains adapters on packed layers; the adapter is saved, loaded and merged for generation."""

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.adapters import config, layers_of, packed_model
from torch_marlin_metal import MarlinLinear
from torch_marlin_metal.integrations.transformers import MarlinConfig

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets")

WORDS = ["<pad>", "<eos>", "<unk>", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "to"]
HEAD = MarlinConfig(modules_to_not_convert="lm_head")


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sft_trainer(model, folder):
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=0.02,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    rows = datasets.Dataset.from_dict({"text": ["the cat sat on a mat", "the dog ran to a cat"] * 16})
    torch.manual_seed(0)  # the same adapters for each model
    return trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer(), peft_config=config())


def losses_of(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_sft_trainer_trains_an_adapter_that_loads_and_merges(tmp_path):
    packed_model().save_pretrained(tmp_path / "base")
    base, other, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=HEAD) for _ in range(3)
    )
    trainer = sft_trainer(base, tmp_path / "run")
    assert len(layers_of(trainer.model)) == 6
    losses = losses_of(trainer)
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.1
    dense = sft_trainer(other.dequantize(), tmp_path / "dense")
    assert not layers_of(dense.model)
    torch.testing.assert_close(losses, losses_of(dense), rtol=1e-3, atol=1e-3)
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    ids, options = (
        torch.tensor([[3, 4]]),
        {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": 127},
    )
    with torch.no_grad():
        expected = trainer.model.eval()(ids).logits
        torch.testing.assert_close(loaded(ids).logits, expected)
        trained = trainer.model.generate(input_ids=ids, **options)
        assert torch.equal(loaded.generate(input_ids=ids, **options), trained)
        merged = loaded.merge_and_unload()
        assert isinstance(merged.model.layers[0].self_attn.q_proj, MarlinLinear)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=HEAD)
        assert (merged(ids).logits - expected).norm() < 0.5 * (plain(ids).logits - expected).norm()
        assert merged.generate(input_ids=ids, **options).shape == (1, 6)


def test_a_packed_head_is_named(tmp_path):
    """SFTTrainer multiplies with lm_head.weight itself; a packed head has no such tensor."""
    trainer = sft_trainer(packed_model(), tmp_path)
    with pytest.raises(TypeError, match=r"weight\[...\]: got MarlinLinear.weight, which only describes a packed"):
        trainer.train()
