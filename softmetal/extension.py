"""Puts the extension's test build, which has the MPS backend, in the place of the installed `torch_marlin_metal._C`."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from .build import EXTENSION

MODULE = "torch_marlin_metal._C"


class TestBuildFinder(importlib.abc.MetaPathFinder):
    """Finds the test build under the extension's name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        if not EXTENSION.exists():
            raise ImportError(
                f"softmetal: {EXTENSION.name} with the MPS backend is not built: run `make build`, or "
                "`SOFTMETAL=1 python setup.py build_ext --inplace`"
            )
        return importlib.util.spec_from_file_location(MODULE, EXTENSION)


def use_test_build() -> None:
    """Makes `import torch_marlin_metal` load the test build."""
    if MODULE in sys.modules:
        raise ImportError("softmetal: import softmetal before torch_marlin_metal")
    sys.meta_path.insert(0, TestBuildFinder())
