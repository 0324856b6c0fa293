"""Compares `torch-marlin-metal fit` with loaded models, real caches and the records of PyTorch's allocator."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile, record_function
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig

from tests.cli.test_cli import call
from tests.support.documented_keys import documented, keys_of
from tests.support.llama import MODELS, write_gguf
from tests.support.small_llama import save_small_llama
from torch_marlin_metal.cli.models import fit as module
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.models.report import module_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small_llama(tmp_path_factory.mktemp("small"), tokenizer=False)


def fitted(*arguments: object) -> dict:
    code, out, err = call("fit", *arguments, "--json")
    assert code in (0, 1), err
    return json.loads(out)


def allocated(first, second) -> int:
    """Returns the peak of PyTorch's allocations while the second function runs."""
    with profile(profile_memory=True) as record:
        first()
        with record_function("second"):
            second()
    now = most = 0
    events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(event.start_ns() for event in events if event.name() == "second")
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now) if event.start_ns() > begin else most
    return most


def test_the_bytes_are_those_of_models_that_are_loaded(folder):
    value = fitted(folder)
    assert keys_of(value) == documented("fit")
    found = {row["format"]: row["weight_bytes"] for row in value["formats"]}
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


SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {**SIZES, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 32}
CONTEXT, TOKENS = 160, 96
RUNS = {
    "llama": (LlamaConfig(**SMALL), "floats", 0),
    "gemma2": (Gemma2Config(**SMALL, sliding_window=32), "uint4b8", 0),
    # On the CPU, the run also copies the interleaved halves of the experts' first products. The GPU's kernel reads
    # these in place, so the prediction leaves out the copies.
    "gpt-oss": (
        GptOssConfig(
            **SMALL | {"intermediate_size": 512}, num_local_experts=2, num_experts_per_tok=2, sliding_window=32
        ),
        "uint4b8",
        2 * TOKENS * 2 * 512 * 4,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_memory_is_that_of_a_run(name, tmp_path):
    """The real run computes attention as PyTorch does on mps: it stores all scores of a prompt."""
    config, weight_format, copies = RUNS[name]
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    found = fitted(tmp_path, "--context", CONTEXT, "--prompt-tokens", TOKENS)
    options = {} if weight_format == "floats" else {"quantization_config": MarlinConfig(weight_format)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    ids = torch.zeros(1, CONTEXT, dtype=torch.long)
    held = []

    def run(part) -> None:
        cache = held.pop() if held else None
        output = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        held.append(output.past_key_values)

    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        most = allocated(lambda: run(ids[:, :-TOKENS]), lambda: run(ids[:, -TOKENS:]))
    cache = sum(one.untyped_storage().nbytes() for layer in held[0].layers for one in (layer.keys, layer.values))
    # the cache also stores the length of a window, a number
    assert found["cache_bytes"] == pytest.approx(cache, abs=64)
    assert found["activation_bytes"] + found["cache_bytes"] + copies == pytest.approx(most, rel=0.01)
    (row,) = (row for row in found["formats"] if row["format"] == weight_format)
    # fit does not count the format of a packed table, three int32
    assert row["weight_bytes"] == pytest.approx(module_bytes(model), abs=12)
    assert row["total_bytes"] + copies == pytest.approx(module_bytes(model) + most, rel=0.005)


def test_what_a_mac_lends_its_gpu():
    for memory, expected in (("16GB", 16 * 2**30 * 2 // 3), ("36 gb", 24 * 2**30), ("64GB", 48 * 2**30)):
        assert module.gpu_memory(memory) == expected
    for wrong in ("16", "16PB", "many GB", ""):
        with pytest.raises(ValueError, match="--memory: expected a number and one of B, kB, MB"):
            module.gpu_memory(wrong)


def test_the_answer_is_no_if_nothing_fits(folder):
    code, out, _ = call("fit", folder, "--memory", "0.1MB", "--context", 8)
    assert (code, "yes" in out, "uint4b8" in out) == (1, False, True)
    sizes = {row["format"]: row["total_bytes"] for row in fitted(folder, "--context", 8)["formats"]}
    between = (sizes["floats"] + sizes["uint4"]) / 2 * 1.5 / 2**20
    rows = fitted(folder, "--memory", f"{between:.3f}MB", "--context", 8)["formats"]
    assert [row["fits"] for row in rows] == [False, *[True] * len(WEIGHT_FORMATS)]


def test_a_model_that_needs_values_is_one_sentence(folder, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, **inputs: inputs["input_ids"].nonzero().item())
    code, out, err = call("fit", folder)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "LlamaForCausalLM does not run without values" in err
