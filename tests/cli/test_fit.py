"""Tests `torch-marlin-metal fit` beside loaded models, real caches and what PyTorch's allocator records of a run."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.support.llama import MODELS, write_gguf
from tests.support.small_llama import save_small_llama
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.cli.models import fit as module
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.models.report import module_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small_llama(tmp_path_factory.mktemp("small"), tokenizer=False)


def call(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["fit", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def fitted(*arguments: object) -> dict:
    code, out, err = call(*arguments, "--json")
    assert code in (0, 1), err
    return json.loads(out)


def allocated(run) -> int:
    """Returns the most bytes that PyTorch's allocator has handed out while a function runs, without those before it."""
    with profile(profile_memory=True) as record:
        run()
    now = most = 0
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def test_the_bytes_are_those_of_models_that_are_loaded(folder):
    found = {row["format"]: row["weight_bytes"] for row in fitted(folder)["formats"]}
    assert list(found) == ["floats", *WEIGHT_FORMATS]
    assert found.pop("floats") == module_bytes(AutoModelForCausalLM.from_pretrained(folder))
    for name in ("uint4", "nvfp4", "lut4"):
        config = MarlinConfig(name)
        assert found[name] == module_bytes(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config))
    for name in ("gptq-sym-g32-actorder", "bitsandbytes-nf4-doublequant", "compressed-tensors-nvfp4"):
        (row,) = fitted(MODELS / name)["formats"]
        assert row["format"] == "as packed"
        assert row["weight_bytes"] == module_bytes(AutoModelForCausalLM.from_pretrained(MODELS / name, dtype="auto"))


def test_a_gguf_file_with_an_embedding_of_another_type(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, MODELS / "auto-round-asym-g32", "Q4_0", embedding="Q8_0")
    (row,) = fitted(file)["formats"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype="auto")
    assert row["weight_bytes"] == module_bytes(loaded)


def test_the_cache_and_the_activations_are_those_of_a_run(folder):
    """The real run computes attention as PyTorch does on mps: with all scores of a prompt.

    What an operator holds only while it computes is not counted: a few percent of the activations.
    """
    found = fitted(folder, "--context", 48, "--prompt-tokens", 32)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.zeros(1, 48, dtype=torch.long)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        begun = model(ids[:, :16], use_cache=True, logits_to_keep=1).past_key_values
        before = sum(one.nbytes for layer in begun.layers for one in (layer.keys, layer.values))
        outputs = []
        most = allocated(
            lambda: outputs.append(model(ids[:, 16:], past_key_values=begun, use_cache=True, logits_to_keep=1))
        )
    cache = sum(one.nbytes for layer in outputs[0].past_key_values.layers for one in (layer.keys, layer.values))
    assert found["cache_bytes"] == cache == 48 * 2 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, D, fp32
    assert 0.85 * most < found["activation_bytes"] + cache - before <= most
    in_all = module_bytes(model) + before + most
    assert found["formats"][0]["total_bytes"] == pytest.approx(in_all, rel=0.03)
    whole = fitted(folder, "--context", 48, "--prompt-tokens", 48)
    assert whole["activation_bytes"] > found["activation_bytes"]
    assert [row["total_bytes"] - row["weight_bytes"] for row in whole["formats"]] == [
        whole["activation_bytes"] + cache
    ] * len(whole["formats"])


def test_a_sliding_window_and_experts(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=64, num_hidden_layers=2, num_local_experts=4, sliding_window=8, **sizes)
    MixtralForCausalLM(config).half().save_pretrained(tmp_path)
    found = fitted(tmp_path, "--context", 64)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MarlinConfig("uint4b8"))
    assert {row["format"]: row["weight_bytes"] for row in found["formats"]}["uint4b8"] == module_bytes(packed)
    cache = packed(torch.zeros(1, 64, dtype=torch.long), use_cache=True).past_key_values.layers
    expected = sum(one.untyped_storage().nbytes() for layer in cache for one in (layer.keys, layer.values))
    assert found["cache_bytes"] == pytest.approx(expected, abs=64)  # and the window's own length, a number


def test_what_a_mac_lends_its_gpu():
    for memory, expected in (("16GB", 16 * 2**30 * 2 // 3), ("36 gb", 24 * 2**30), ("64GB", 48 * 2**30)):
        assert module.gpu_memory(memory) == expected
    for wrong in ("16", "16PB", "many GB", ""):
        with pytest.raises(ValueError, match="--memory: expected a number and one of B, kB, MB"):
            module.gpu_memory(wrong)


def test_the_answer_is_no_if_nothing_fits(folder):
    code, out, _ = call(folder, "--memory", "0.1MB", "--context", 8)
    assert (code, "yes" in out, "uint4b8" in out) == (1, False, True)
    sizes = {row["format"]: row["total_bytes"] for row in fitted(folder, "--context", 8)["formats"]}
    between = (sizes["floats"] + sizes["uint4"]) / 2 * 1.5 / 2**20
    rows = fitted(folder, "--memory", f"{between:.3f}MB", "--context", 8)["formats"]
    assert [row["fits"] for row in rows] == [False, *[True] * len(WEIGHT_FORMATS)]


def test_a_model_that_needs_values_is_one_sentence(folder, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, **inputs: inputs["input_ids"].nonzero().item())
    code, out, err = call(folder)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "LlamaForCausalLM does not run without values" in err
