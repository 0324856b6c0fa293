"""Results do not depend on PyTorch's default device, because each new tensor of the package names its device."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

from tests.support.fixture_layers import FOLDERS, key, source_of
from tests.support.models import IDS, SIZES, same
from tests.support.reference import FORMATS
from torch_marlin_metal import convert, quantize_model, quantize_weight
from torch_marlin_metal.checkpoints.exporters import EXPORTERS
from torch_marlin_metal.packed_weight import PackedWeight

PACKAGE = Path(__file__).parents[2] / "torch_marlin_metal"
# The factories that a default device affects.
FACTORIES = {name for name, function in vars(torch).items() if any(function is made for made in _device_constructors())}
# Parameters of a layer that a user creates. Like nn.Linear's, they are on the default device.
OF_USERS = {("xlstm/layer.py", "self.weight = nn.Parameter"), ("xlstm/layer.py", "self.bias = nn.Parameter")}


def factories(path: Path) -> Iterator[tuple[int, str, bool]]:
    """For each call that creates a tensor, yields the line, the text and whether the call names a device."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) == "torch" and called.attr in FACTORIES:
            named = any(keyword.arg in ("device", None) for keyword in node.keywords)
            yield node.lineno, text.splitlines()[node.lineno - 1].strip(), named


def test_every_factory_names_its_device() -> None:
    assert {"arange", "tensor", "zeros", "randn", "full"} <= FACTORIES
    wrong, used = [], set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for number, line, named in factories(path):
            exempt = {entry for entry in OF_USERS if entry[0] == name and line.startswith(entry[1])}
            used |= exempt
            if not named and not exempt:
                wrong.append(f"{name}:{number}: {line}")
    assert not wrong, wrong
    assert used == OF_USERS, "an exemption that nothing needs"


@pytest.fixture
def default_meta() -> Iterator[None]:
    """Makes meta the default device, so that a factory without a device creates a tensor without values."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def weight() -> torch.Tensor:
    return torch.randn(24, 64, generator=torch.Generator().manual_seed(0), device="cpu")


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_quantizes_under_any_default_device(weight_format: str, method: str) -> None:
    expected = quantize_weight(weight(), weight_format, method=method)
    with torch.device("meta"):
        got = quantize_weight(weight(), weight_format, method=method)
        decoded = got.dequantize()
    assert same(got.tensors(), expected.tensors())
    assert torch.equal(decoded, expected.dequantize())


@pytest.mark.parametrize("target", EXPORTERS)
def test_exports_under_any_default_device(target: str) -> None:
    packed = quantize_weight(weight(), "uint4b8", 32)
    packed.name = "layer"
    expected = EXPORTERS[target]().tensors(packed)
    with torch.device("meta"):
        got = EXPORTERS[target]().tensors(packed)
    assert same(got, expected)


@pytest.mark.parametrize("folder", FOLDERS, ids=key)
def test_reads_under_any_default_device(folder: Path) -> None:
    path = source_of(folder)
    expected = list(convert.read_layers(path, on_unsupported="dequantize"))
    with torch.device("meta"):
        got = list(convert.read_layers(path, on_unsupported="dequantize"))
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.dequantize(), other.dequantize(), rtol=0, atol=0, equal_nan=True)
        assert isinstance(one, PackedWeight) == isinstance(other, PackedWeight)


def test_a_model_under_any_default_device(default_meta: None) -> None:
    model = nn.Sequential(nn.Linear(64, 64, device="cpu"), nn.ReLU(), nn.Linear(64, 32, device="cpu"))
    quantize_model(model, "nvfp4", progress=False)
    y = model(torch.ones(2, 64, device="cpu"))
    assert y.device.type == "cpu"
    assert bool(y.isfinite().all())


def test_from_pretrained_with_mps_as_the_default_device(mps: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from torch_marlin_metal.integrations.transformers import MarlinConfig

    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    torch.set_default_device(mps)
    try:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MarlinConfig("nf4"))
        logits = model(IDS.to(mps)).logits
    finally:
        torch.set_default_device(None)
    there = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MarlinConfig("nf4"))
    torch.testing.assert_close(logits.cpu(), there(IDS).logits, rtol=1e-4, atol=1e-4)
