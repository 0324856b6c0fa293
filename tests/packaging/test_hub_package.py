"""Tests the package for Hugging Face's kernel hub, which is generated from the sources.

Each build chooses the namespace of its operators.
"""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_marlin_metal as tmm
from build_support import hub_package
from torch_marlin_metal import interface

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def derived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "package"
    hub_package.derive(folder)
    return folder


def test_no_operator_is_registered_under_the_name_of_the_wheel(derived: Path) -> None:
    """With the same names, one process could not load both the wheel and a kernel of the hub."""
    sources = [path for path in derived.glob("csrc/**/*") if path.suffix in (".cpp", ".h", ".mm")]
    text = "\n".join(path.read_text() for path in sources)
    assert not re.search(r"TORCH_LIBRARY\w*\(torch_marlin_metal", text)
    assert '"torch_marlin_metal::' not in text
    registrations = re.findall(r"MARLIN_LIBRARY\w*\(TORCH_EXTENSION_NAME, ", text)
    ours = "\n".join(path.read_text() for path in ROOT.glob("csrc/**/*") if path.is_file())
    assert len(registrations) == len(re.findall(r"TORCH_LIBRARY\w*\(torch_marlin_metal, ", ours)) > 20


def test_all_files_of_the_build_exist_and_do_not_include_python(derived: Path) -> None:
    listed = re.findall(r'^    "(.+)",$', (derived / "build.toml").read_text(), re.MULTILINE)
    assert len(listed) > 150
    assert [name for name in listed if not (derived / name).is_file()] == []
    assert not any("pybind11" in (derived / name).read_text() for name in listed)
    for path in sorted(derived.glob("csrc/**/*")):
        if path.is_file():
            included = re.findall(r'#include "((?:csrc|kernels)/.+)"', path.read_text())
            assert [name for name in included if name not in listed] == [], path


def test_the_hubs_own_reader_takes_the_build_file(derived: Path) -> None:
    kernels = pytest.importorskip("kernels._rust", reason="the package kernels is not installed")
    found = kernels.Build.open(derived).general
    assert [str(backend) for backend in found.backends] == ["cpu", "metal"]


def test_a_build_for_the_cpu_loads_beside_the_wheel(derived: Path, everything: bool) -> None:
    # Imports a module inside the package, because `import kernels` alone would find this repository's folder `kernels`.
    pytest.importorskip("kernels._rust", reason="the package kernels is not installed")
    kernels: Any = importlib.import_module("kernels")
    if not everything:
        pytest.skip("compiles the operators again, which takes minutes: --everything")
    hub_package.build_cpu(derived, "_torch_marlin_metal_test")
    check_loaded(kernels.get_local_kernel(derived, backend="cpu"))


def check_loaded(kernel: Any) -> None:
    """Compares the hub's operators with those of the wheel, bit for bit."""
    assert set(kernel.__all__) == set(interface.OPERATORS)
    assert kernel.gemm is not torch.ops.torch_marlin_metal.gemm
    torch.manual_seed(0)
    weight = tmm.quantize_weight(torch.randn(96, 256), "uint4b8", 128)
    a = torch.randn(3, 256, requires_grad=True)
    options = {"weight_format": "uint4b8", "group_size": 128}
    results = []
    for gemm in (kernel.gemm, torch.ops.torch_marlin_metal.gemm):
        product = gemm(a, weight.b_packed, weight.scales, **options)
        (gradient,) = torch.autograd.grad(product.sum(), a)
        results.append((product, gradient))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    with pytest.raises(ValueError, match=rf"^{kernel.ops.name}::gemm: a: expected"):
        kernel.gemm(a.double(), weight.b_packed, weight.scales, **options)
    q = torch.randn(1, 2, 8, 16)
    gate = torch.randn(1, 2, 8)
    assert torch.equal(kernel.mlstm(q, q, q, gate, gate)[0], torch.ops.torch_marlin_metal.mlstm(q, q, q, gate, gate)[0])
    assert importlib.import_module("kernels").get_loaded_kernels()
