"""Tests that the package refuses an extension that was built for another torch or Python, or from other sources."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torch_marlin_metal import extension, interface


def load_with(monkeypatch: pytest.MonkeyPatch, found: ModuleType | ImportError) -> str:
    """Returns the package's error when the import of the extension returns or raises `found`."""

    def import_module(name: str) -> ModuleType:
        assert name == "torch_marlin_metal._C"
        if isinstance(found, ImportError):
            raise found
        return found

    monkeypatch.setattr(extension.importlib, "import_module", import_module)
    with pytest.raises(extension.ExtensionError) as refusal:
        extension._load()
    return str(refusal.value)


def built_for(version: str) -> ModuleType:
    module = ModuleType("_C")
    vars(module).update(vars(extension.native))
    module.torch_version = version
    return module


def test_another_minor_release(monkeypatch) -> None:
    message = load_with(monkeypatch, built_for("2.99.0"))
    assert f"was built for torch 2.99.0, but this is torch {torch.__version__}" in message
    assert "--no-build-isolation" in message and "pip install torch==2.99.0" in message


def test_a_patch_release_is_taken(monkeypatch) -> None:
    module = built_for(re.sub(r"\.\d+$", ".99", torch.__version__.split("+")[0]))
    monkeypatch.setattr(extension.importlib, "import_module", lambda name: module)
    assert extension._load() is module


def older_build() -> ModuleType:
    return built_for(torch.__version__)


def test_an_older_build_without_a_function(monkeypatch) -> None:
    module = older_build()
    del module.gemm_plans
    message = load_with(monkeypatch, module)
    assert "built from another version of the sources" in message and "it has no function gemm_plans" in message
    assert extension.BUILD_COMMAND in message and "build_ext --inplace" in message


def test_an_older_build_without_an_operator(monkeypatch) -> None:
    monkeypatch.setitem(interface.OPERATORS, "operator_of_tomorrow", "a b")
    message = load_with(monkeypatch, older_build())
    assert "it has no operator operator_of_tomorrow" in message and extension.BUILD_COMMAND in message


def test_an_older_build_whose_operator_lacks_an_argument(monkeypatch) -> None:
    monkeypatch.setitem(interface.OPERATORS, "gptq_repack", "qweight perm code_bits order")
    message = load_with(monkeypatch, older_build())
    assert "its operator gptq_repack takes (qweight, perm, code_bits), not (qweight, perm, code_bits, order)" in message


def test_the_interface_lists_every_name_of_the_extension() -> None:
    """interface.py lists every operator and function of the extension.

    If interface.py omitted a name, the package would load an older build that does not have this name. Operators that
    only the mps backend has are not compared.
    """
    sources = (Path(__file__).parents[2] / "csrc").rglob("*.mm")
    definition = r'm\.def\(\s*(?:weight_schema\()?"(\w+)\('
    for_macs = {name for source in sources for name in re.findall(definition, source.read_text())}
    assert "compile_gemm" in for_macs
    prefix = "torch_marlin_metal::"
    registered = {name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if prefix in name}
    public = {name for name in registered if not name.startswith("_") and name not in for_macs}
    assert {name: interface.arguments(name) for name in public} == interface.OPERATORS
    assert set(interface.FUNCTIONS) == {name for name in dir(extension.native) if not name.startswith("__")}


def test_a_missing_symbol_is_not_printed(monkeypatch) -> None:
    symbol = "_ZN5torch8autograd" + "x" * 300
    message = load_with(monkeypatch, ImportError(f"_C.so: undefined symbol: {symbol}"))
    assert f"does not load with torch {torch.__version__}" in message and "--no-build-isolation" in message
    assert symbol not in message


def test_another_python(monkeypatch) -> None:
    message = load_with(monkeypatch, ModuleNotFoundError("No module named 'torch_marlin_metal._C'"))
    assert f"no compiled extension for Python {sys.version_info.major}.{sys.version_info.minor}." in message
