"""Imports this package's module for peft when a script imports peft, so that the script needs no extra import."""

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
    """An import hook that finds no modules. When peft is imported, it adds a step to peft's loader."""

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
    """Registers the adapters now if peft is loaded, else when peft is imported."""
    if "peft" in sys.modules:
        register()
    elif _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)


def stop() -> None:
    """Stops waiting for the import of peft."""
    if _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)


def register() -> None:
    """Lets peft add adapters to packed layers. Warns if the peft version is not supported."""
    try:
        importlib.import_module("torch_marlin_metal.integrations.peft")
    except ImportError as error:
        warnings.warn(f"peft cannot add adapters to packed layers: {error}", stacklevel=2)
