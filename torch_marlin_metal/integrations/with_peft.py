"""Imports this package's module for peft when peft is imported, so that scripts need no import."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Watcher(MetaPathFinder):
    """Finds no module itself. When peft is imported, adds a step to its loader."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "peft":
            return None
        stop()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            register()

        loader.exec_module = exec_module
        return spec


_watcher = _Watcher()


def start() -> None:
    """Registers the adapters now if peft is loaded, and otherwise when it is imported."""
    if "peft" in sys.modules:
        register()
    elif _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)


def stop() -> None:
    """Ends the wait for peft."""
    if _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)


def register() -> None:
    """Lets peft add adapters to packed layers. If this peft does not allow it, warns."""
    try:
        importlib.import_module("torch_marlin_metal.integrations.peft")
    except ImportError as error:
        warnings.warn(f"peft cannot add adapters to packed layers: {error}", stacklevel=2)
