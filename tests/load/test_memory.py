"""A load allocates little more than the loaded model, because it reads a checkpoint in parts and frees each part."""

import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from tests.checkpoints.test_gguf import Writer
from tests.integrations.test_beside_transformers import scheme
from torch_marlin_metal import load_quantized
from torch_marlin_metal.checkpoints import float_rows, grouped
from torch_marlin_metal.checkpoints.files import safetensors
from torch_marlin_metal.checkpoints.formats import gguf_blocks
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.quantize import weight as rounding

MOST = 1.1  # times the memory of the loaded model
H, LAYERS, EXPERTS, VOCABULARY = 256, 12, 8, 2048
SIZES = {"vocab_size": VOCABULARY, "hidden_size": H, "intermediate_size": 2 * H, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True}
MIXTURE = {"num_experts": EXPERTS, "moe_intermediate_size": H, "num_experts_per_tok": 2, "num_hidden_layers": 4}
RNG = np.random.default_rng(0)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
MLX = {"bits": 4, "group_size": 64, "mode": "affine"}
FP8 = scheme("float-quantized", kind="float")


def words(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.integers(0, 2**32, shape, dtype=np.uint32).view(np.int32))


def gptq(N: int, K: int) -> dict[str, torch.Tensor]:
    return {"qweight": words(K // 8, N), "qzeros": words(K // 64, N // 8), "scales": torch.rand(K // 64, N).half()}


def awq(N: int, K: int) -> dict[str, torch.Tensor]:
    return {"qweight": words(K, N // 8), "qzeros": words(K // 64, N // 8), "scales": torch.rand(K // 64, N).half()}


def mlx(N: int, K: int, bits: int = 4) -> dict[str, torch.Tensor]:
    scales = {role: torch.rand(N, K // 64).half() for role in ("scales", "biases")}
    return {"weight": words(N, K * bits // 32).view(torch.uint32), **scales}


def e5m2(N: int, K: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.rand(N, K).to(torch.float8_e5m2), "weight_scale": torch.rand(N, 1)}


def directory(part: Callable[[int, int], dict[str, torch.Tensor]], settings: dict, mixture: bool = False):
    """Returns a function that writes random layers of a checkpoint directory and returns its path."""

    def write(path: Path) -> Path:
        config = Qwen3MoeConfig(**SIZES | MIXTURE) if mixture else LlamaConfig(**SIZES)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        state: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict().items():
            base = name.removesuffix(".weight")
            if name.endswith("experts.gate_up_proj"):
                for index in range(EXPERTS):
                    for kind in ("gate_proj", "up_proj", "down_proj"):
                        inner = f"{name.removesuffix('gate_up_proj')}{index}.{kind}"
                        state |= {f"{inner}.{key}": value for key, value in part(H, H).items()}
            elif base.endswith("_proj") and "experts" not in name:
                state |= {f"{base}.{key}": value for key, value in part(*tensor.shape).items()}
            elif "experts" not in name and name != "lm_head.weight":
                state[name] = torch.ones(tensor.shape, dtype=torch.float16)
        save_file(state, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": settings}))
        return path

    return write


def of_gguf(path: Path) -> Path:
    LlamaConfig(**SIZES).save_pretrained(path)
    writer = Writer(path / "model.gguf")
    for key, value in (("block_count", LAYERS), ("embedding_length", H), ("feed_forward_length", 2 * H),
                       ("head_count", 4), ("head_count_kv", 4), ("layer_norm_rms_eps", 1e-6)):  # fmt: skip
        getattr(writer.gguf, f"add_{key}")(value)

    def add(name: str, N: int, K: int) -> None:
        writer.add(name, RNG.integers(0, 64, (N, K // 256 * 210), dtype=np.uint8), "Q6_K")

    norms = ["output_norm"]
    for layer in range(LAYERS):
        norms += [f"blk.{layer}.{part}_norm" for part in ("attn", "ffn")]
        for part in ("q", "k", "v", "output"):
            add(f"blk.{layer}.attn_{part}.weight", H, H)
        for part, N, K in (("gate", 2 * H, H), ("up", 2 * H, H), ("down", H, 2 * H)):
            add(f"blk.{layer}.ffn_{part}.weight", N, K)
    add("token_embd.weight", VOCABULARY, H)  # the largest tensor last, when all others are in memory
    for name in norms:
        writer.add(f"{name}.weight", np.ones(H, np.float32))
    return writer.write()


# A function that writes the files, and arguments of the load.
CASES = {
    "as it is stored": (directory(gptq, GPTQ), {}),
    "words along N": (directory(awq, AWQ), {}),
    "transposed": (directory(mlx, MLX), {}),
    "6 bits in planes": (directory(partial(mlx, bits=6), MLX | {"bits": 6}), {}),
    "a mixture": (directory(gptq, GPTQ, mixture=True), {}),
    "GGUF Q6_K": (of_gguf, {}),
    "no weight format": (directory(e5m2, FP8), {}),
    "excluded experts": (directory(gptq, GPTQ, mixture=True), {"exclude": "*.experts"}),
    "a mixture partly in floats": (directory(gptq, GPTQ, mixture=True), {"exclude": "*.down_proj"}),
    "an excluded table": (of_gguf, {"exclude": "*.embed_tokens"}),
}


def empty(path: Path) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(path.parent if path.is_file() else path)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float16)


def held_by(model: torch.nn.Module) -> int:
    return sum({id(t): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}.values())


def peak_of(call: Callable[[], object], mapped: Path | None = None) -> int:
    """Returns the peak bytes of torch's allocator for the CPU during a call.

    A file that is mapped to memory is an allocation, unless `mapped` names it.
    """
    ignored = 0 if mapped is None else mapped.stat().st_size
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    found: list[tuple[int, int]] = []
    waiting = list(recorded.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        is_counted = event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu"
        if is_counted and abs(event.extra_fields.alloc_size) != ignored:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    sizes = np.array([size for _, size in sorted(found)])
    return int(sizes.cumsum().max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_little_above_what_stays(name, tmp_path, monkeypatch) -> None:
    # pieces are as small a part of this model as of a real one
    monkeypatch.setattr(gguf_blocks, "PIECE_BYTES", 1 << 15)
    monkeypatch.setattr(grouped, "PIECE", 1 << 14)
    # no tensor then reuses memory of the first load
    monkeypatch.setattr(safetensors, "POOLED_BYTES", 1 << 40)
    monkeypatch.setattr(float_rows, "PIECE", 1 << 14)
    write, choices = CASES[name]
    path = write(tmp_path)
    load_quantized(empty(path), path, **choices, progress=False)  # allocates what is created once and kept
    model = empty(path)
    peak = peak_of(lambda: load_quantized(model, path, **choices, progress=False))
    assert held_by(model) <= peak < MOST * held_by(model)


@pytest.mark.filterwarnings("ignore")
def test_the_peak_while_a_model_is_quantized_is_little_above_what_stays(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rounding, "CHUNK_ELEMENTS", 1 << 13)  # as small a part of this model as of a real one
    small = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512}
    config = Qwen3MoeConfig(**SIZES | MIXTURE | small | {"moe_intermediate_size": 128, "num_experts": 16})
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(tmp_path)

    def load() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MarlinConfig())

    held = held_by(load())
    assert held <= peak_of(load, tmp_path / "model.safetensors") < MOST * held


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["transposed", "a mixture", "GGUF Q6_K"])
def test_the_peak_on_the_device_is_little_above_what_stays(name, tmp_path, mps) -> None:
    path = CASES[name][0](tmp_path)
    model = empty(path)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_stats()["allocated_bytes.all.current"]
    load_quantized(model, path, device=mps, progress=False)
    stats = torch.accelerator.memory_stats()
    held = stats["allocated_bytes.all.current"] - before
    assert held > 0
    assert stats["allocated_bytes.all.peak"] - before < MOST * held
