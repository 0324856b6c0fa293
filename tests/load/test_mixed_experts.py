"""Experts whose gate, up and down have different formats: each stack that a format can represent is packed."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import torch_marlin_metal.integrations.transformers  # noqa: F401
from tests.support.mixtures import SIZES
from tests.support.models import IDS
from tests.support.reference import BLOCKS, E2M1, FIELDS, OFFSETS, code_bits, e4m3, e8m0, to_numpy
from torch_marlin_metal import MarlinExperts, PackedWeight, load_quantized, quantize_weight
from torch_marlin_metal.checkpoints.formats.native import NativeExporter
from torch_marlin_metal.layers import ExpertWeights
from torch_marlin_metal.layers.common_format import Common, common_of, stack_exactly, widened, wider
from torch_marlin_metal.layers.mixed_experts import FEW_ROWS, FloatExpertWeights, JoinedExpertWeights

PARTS = ("gate_proj", "up_proj", "down_proj")
E, H, INNER = 4, 64, 96
CONFIG = SIZES | {"num_experts": E, "moe_intermediate_size": INNER, "num_hidden_layers": 1}
EXPERTS = "model.layers.0.mlp.experts"


def decoded(weight: PackedWeight) -> np.ndarray:
    """Decodes a weight with NumPy, to fp64 `[N, K]`."""
    bits, name = code_bits(weight.weight_format), weight.weight_format
    stored = bits if weight.b_high is None else 4
    words, shifts = weight.b_packed.numpy().view(np.uint32), np.arange(0, 32, stored, dtype=np.uint32)
    codes = (
        ((words[:, None] >> shifts[None, :, None]) & ((1 << stored) - 1)).reshape(weight.K, weight.N).astype(np.int64)
    )
    if weight.b_high is not None:
        k = np.arange(weight.K)
        places = np.add.outer(BLOCKS[bits], FIELDS[bits]).ravel().astype(np.uint32)
        high = weight.b_high.numpy().view(np.uint32)[k // len(places)] >> places[k % len(places)][:, None]
        codes += (high & ((1 << bits - 4) - 1)).astype(np.int64) << 4
    group = np.arange(weight.K) // weight.group_size
    if name == "nvfp4":
        return (E2M1[codes] * e4m3(weight.scales.numpy())[group] * weight.global_scale.double().numpy()).T
    if name == "mxfp4":
        return (E2M1[codes] * e8m0(weight.scales.numpy())[group]).T
    zeros = OFFSETS.get(name) if weight.zeros is None else to_numpy(weight.zeros)[group].astype(np.float64)
    scales = to_numpy(weight.scales)[group]
    return (codes * scales + zeros if name.endswith("_bias") else (codes - zeros) * scales).T


def packed(weight: torch.Tensor, name: str, kind: str) -> PackedWeight | None:
    """Returns a weight in a format and group size, such as "uint4 32", or None for floats."""
    if kind == "floats":
        return None
    weight_format, group_size, *dtype = kind.split()
    options = {"scale_dtype": getattr(torch, dtype[0])} if dtype else {}
    found = quantize_weight(weight, weight_format, int(group_size), **options)
    return replace(found, name=name)


def write(path: Path, kinds: dict[str, str | list[str]]) -> Qwen3MoeForCausalLM:
    """Writes a Qwen3 mixture in this package's format. Returns it with the weights that the files decode to.

    Args:
        path: the directory.
        kinds: the format of each part, or of each part of each expert.
    """
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).eval()
    experts, exporter = model.get_submodule(EXPERTS), NativeExporter()
    state = {name: value for name, value in model.state_dict().items() if ".experts." not in name}
    with torch.no_grad():
        for index in range(E):
            both, down = experts.gate_up_proj[index], experts.down_proj[index]
            for part, weight in zip(PARTS, (both[:INNER], both[INNER:], down), strict=True):
                kind = kinds[part] if isinstance(kinds[part], str) else kinds[part][index]
                name = f"{EXPERTS}.{index}.{part}"
                found = packed(weight.clone(), name, kind)
                if found is None:
                    state[f"{name}.weight"] = weight.clone()
                    continue
                weight.copy_(torch.from_numpy(decoded(found)))
                state |= {f"{name}.{key}": tensor for key, tensor in exporter.own_tensors(found, name).items()}
    path.mkdir()
    save_file({name: value.contiguous() for name, value in state.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads(model.config.to_json_string()) | {"architectures": ["Qwen3MoeForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": exporter.settings()}))
    return model


def by_load_quantized(path: Path, device: str) -> Qwen3MoeForCausalLM:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
    load_quantized(model, path, device=device, progress=False)
    return model.eval()


def by_from_pretrained(path: Path, device: str) -> Qwen3MoeForCausalLM:
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, device_map={"": device}, output_loading_info=True
    )
    assert not any(info.values()), info
    return model


def in_fp64(experts: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> np.ndarray:
    """Computes the experts of a float model in NumPy."""
    gate_up, down = (experts.get_parameter(name).detach().double().numpy() for name in ("gate_up_proj", "down_proj"))
    y = np.zeros((len(x), H))
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].double().tolist(), strict=True):
            gate, up = np.split(gate_up[expert] @ x[token].double().numpy(), 2)
            y[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return y


# The formats of the parts, the classes of both stacks, and the bytes per weight of gate, up and down.
BOTH, DOWN = 2 * E * INNER * H, E * INNER * H
CASES = {
    "down in floats": (
        {"gate_proj": "uint4b8 32", "up_proj": "uint4b8 32", "down_proj": "floats"},
        (ExpertWeights, FloatExpertWeights),
        BOTH * (0.5 + 2 / 32) + DOWN * 4,
    ),
    "gate and up in floats": (
        {"gate_proj": "floats", "up_proj": "floats", "down_proj": "uint4b8 32"},
        (FloatExpertWeights, ExpertWeights),
        BOTH * 4 + DOWN * (0.5 + 2 / 32),
    ),
    "up in floats": (
        {"gate_proj": "uint4 32", "up_proj": "floats", "down_proj": "mxfp4 32"},
        (JoinedExpertWeights, ExpertWeights),
        BOTH / 2 * (0.5 + 3 / 32 + 4) + DOWN * (0.5 + 1 / 32),
    ),
    "three formats": (
        {"gate_proj": "uint4 32", "up_proj": "mxfp4 32", "down_proj": "nvfp4 16"},
        (JoinedExpertWeights, ExpertWeights),
        BOTH / 2 * (1 + 3 / 32 + 1 / 32) + DOWN * (0.5 + 1 / 16) + 4 * E,
    ),
    "symmetric experts among others": (
        {"gate_proj": "uint4b8 32", "up_proj": "uint4b8 32", "down_proj": ["uint4 32", "uint4b8 32"] * 2},
        (ExpertWeights, ExpertWeights),
        BOTH * (0.5 + 2 / 32) + DOWN * (0.5 + 3 / 32),
    ),
    "experts of 4 and 6 bits": (
        {"gate_proj": "uint4b8 32", "up_proj": "uint6b32 32", "down_proj": ["uint4b8 32", "uint6b32 32"] * 2},
        (JoinedExpertWeights, ExpertWeights),
        BOTH / 2 * (0.5 + 0.75 + 4 / 32) + DOWN * (0.75 + 2 / 32),
    ),
    "one expert in another format": (
        {"gate_proj": "uint4b8 32", "up_proj": "uint4b8 32", "down_proj": ["uint4b8 32"] * 3 + ["mxfp4 32"]},
        (ExpertWeights, FloatExpertWeights),
        BOTH * (0.5 + 2 / 32) + DOWN * 4,
    ),
}


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("name", CASES)
def test_each_stack_that_can_be_packed_is_packed(name, device, tmp_path, request) -> None:
    kinds, classes, size = CASES[name]
    device = request.getfixturevalue("mps") if device == "mps" else device
    exact = write(tmp_path / "saved", kinds).get_submodule(EXPERTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = by_load_quantized(tmp_path / "saved", device)
    experts = model.get_submodule(EXPERTS)
    assert isinstance(experts, MarlinExperts)
    assert (type(experts.gate_up), type(experts.down)) == classes
    held = [tensor for tensor in experts.state_dict().values() if isinstance(tensor, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in held if tensor.dim() > 1 or tensor.numel() > 8) == size
    for tokens in (1, 3, FEW_ROWS):  # the last: so many rows that they are not computed one by one
        torch.manual_seed(tokens)
        x, weights = torch.randn(tokens, H), torch.rand(tokens, 2)
        ids = torch.stack([torch.randperm(E)[:2] for _ in range(tokens)])
        want = in_fp64(exact, x, ids, weights)
        with torch.no_grad():
            found = experts(x.to(device), ids.to(device), weights.to(device)).cpu().double().numpy()
        assert np.linalg.norm(found - want) / np.linalg.norm(want) < 1e-5


def test_ids_outside_add_nothing() -> None:
    stack = FloatExpertWeights(torch.randn(2, 3, 8), torch.randn(2, 3), [3])
    a, ids = torch.randn(1, 8), torch.tensor([[1, 7]])
    want = stack.weight[1] @ a[0] + stack.bias[1]
    torch.testing.assert_close(stack(a, ids)[0, 0], want)
    assert not stack(a, ids)[0, 1].any()


@pytest.mark.parametrize("name", ["up in floats", "down in floats", "symmetric experts among others"])
def test_a_saved_model_loads_the_same_at_each_entry_point(name, tmp_path) -> None:
    write(tmp_path / "saved", CASES[name][0])
    model = by_from_pretrained(tmp_path / "saved", "cpu")
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        logits = model(IDS).logits
        for load in (by_from_pretrained, by_load_quantized):
            assert torch.equal(load(tmp_path / "again", "cpu")(IDS).logits, logits)
        floats = model.dequantize()
        torch.testing.assert_close(floats(IDS).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("uint4b8 32", "uint4 32", ("uint4", 32, torch.float16)),
        ("uint4 32", "uint4_bias 64", ("uint4_bias", 32, torch.float32)),
        ("uint4b8 32 bfloat16", "uint4b8 64 float16", ("uint4b8", 32, torch.float32)),
        ("uint4b8 32", "uint5b16 32", ("uint5b16", 32, torch.float16)),
        ("uint5 32", "uint6b32 64", ("uint6", 32, torch.float16)),
        ("uint6b32 32", "uint8_bias 32 float32", ("uint8_bias", 32, torch.float32)),
        ("uint4b8 64", "uint4b8 192", ("uint4b8", 64, torch.float16)),
        ("uint4b8 32", "mxfp4 32", None),
    ],
)
def test_the_common_format_is_exact(one, other, expected) -> None:
    torch.manual_seed(0)
    weights = [packed(torch.randn(24, 192), "", kind) for kind in (one, other)]
    found = [common_of(weight) for weight in weights]
    both = None if None in found else wider(*found, 192)
    if expected is not None:
        name = expected[0]
        role = "bias" if name.endswith("_bias") else "none" if "b" in name else "zero_point"
        assert both == Common(code_bits(name), role, *expected[1:])
    assert (both is None) == (expected is None)
    if both is None:
        return
    for weight in weights:
        wide = widened(weight, both).validate()
        assert (wide.weight_format, wide.group_size, wide.scales.dtype) == expected
        np.testing.assert_array_equal(decoded(wide), decoded(weight))
    made = []

    def make():
        made.append(1)
        return [[weight] for weight in weights]

    stack = stack_exactly(make, 2, None)
    assert len(made) == (2 if found[0] != both else 1)
    for index, weight in enumerate(weights):
        np.testing.assert_array_equal(decoded(stack.to_packed(index)), decoded(weight))
