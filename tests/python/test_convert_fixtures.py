"""Every layer in tests/data, written by its producer, decodes to the producer's own weight."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torch_marlin_metal import convert

DATA = Path(__file__).parents[1] / "data"
FOLDERS = sorted(path.parent for path in DATA.glob("*/*/reference.safetensors"))
# What each folder must be read as: the exact form, never a float approximation of it.
EXPECTED = {
    "gptq/autogptq-asym-g128": ("uint4", 128, torch.float32),
    "gptq/autoround-asym-g64-v1-zero0": ("uint4", 64, torch.float16),
    "gptq/autoround-sym-g32": ("uint4b8", 32, torch.float16),
    "gptq/gptqmodel-asym-g64-v1": ("uint4", 64, torch.float16),
    "gptq/gptqmodel-asym-g64-v1-zero0": ("uint4", 64, torch.float16),
    "gptq/gptqmodel-asym-g64-v2": ("uint4", 64, torch.float16),
    "gptq/gptqmodel-sym-g128-v1": ("uint4b8", 128, torch.float16),
    "gptq/gptqmodel-sym-g32-actorder-v1": ("uint4b8", 32, torch.float16),
    "gptq/gptqmodel-sym-gm1-v1": ("uint4b8", 256, torch.float16),
    "awq/autoawq-gemm-asym-g32": ("uint4", 32, torch.float16),
    "awq/autoawq-gemv-asym-g64": ("uint4", 64, torch.float16),
    "awq/autoawq-gemv_fast-asym-g64": ("uint4", 64, torch.float16),
    "awq/autoround-asym-g32": ("uint4", 32, torch.float16),
    "awq/gptqmodel-gemm-asym-g64": ("uint4", 64, torch.bfloat16),
}


def key(folder: Path) -> str:
    return folder.relative_to(DATA).as_posix()


@pytest.mark.filterwarnings("ignore:.*raw zero points of 15")
@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if key(folder) in EXPECTED], ids=key)
def test_layer_equals_the_producers_own_weight(folder: Path) -> None:
    (weight,) = convert.read_layers(folder)
    assert isinstance(weight, convert.PackedWeight)
    (name, reference), *rest = load_file(folder / "reference.safetensors").items()
    assert not rest
    assert name == f"{weight.name}.weight"
    weight_format, group_size, dtype = EXPECTED[key(folder)]
    assert (weight.weight_format, weight.group_size, weight.scales.dtype) == (weight_format, group_size, dtype)
    assert (weight.N, weight.K) == tuple(reference.shape)
    assert torch.equal(weight.dequantize().t().half(), reference)


def test_act_order_is_undone() -> None:
    (weight,) = convert.read_layers(DATA / "gptq/gptqmodel-sym-g32-actorder-v1")
    assert isinstance(weight, convert.PackedWeight)
    assert weight.perm is not None
    assert not torch.equal(weight.perm, torch.arange(weight.K, dtype=torch.int32))


def test_zero_points_of_15_follow_the_rule_that_the_caller_names() -> None:
    folder = DATA / "gptq/gptqmodel-asym-g64-v1-zero0"
    decoded = {}
    for rule in ("word", "masked", "unmasked"):
        with pytest.warns(UserWarning, match="raw zero points of 15.*gptq_zeros_rule"):
            (weight,) = convert.read_layers(folder, gptq_zeros_rule=rule)
        decoded[rule] = weight.dequantize().t().half()
    (reference,) = load_file(folder / "reference.safetensors").values()
    assert torch.equal(decoded["word"], reference)
    assert not torch.equal(decoded["masked"], reference)
    assert not torch.equal(decoded["unmasked"], decoded["masked"])
