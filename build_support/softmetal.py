"""The only code of the build that uses `softmetal/`, the software Metal device, which is never part of a wheel."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / "softmetal"

#: Stand-ins for the headers of Apple's frameworks, a folder for each. They are checked against Apple's metadata.
STAND_INS = _FOLDER / "runtime" / "include"


def link_with_mps_sources(command: Any, extension: Any, mps_sources: list[str]) -> None:
    """Links the extension again, after `command` has built it, with its MPS backend for the software device.

    Args:
        command: the running build_ext.
        extension: the extension that has been built.
        mps_sources: the sources that the ordinary Linux build leaves out.
    """
    _load("extension").link_with_mps_sources(command, extension, mps_sources)


def api_check_command(stand_ins: Path, objects: Iterable[Path]) -> list[str]:
    """Returns a command that compares headers and compiled objects with Apple's metadata and prints a summary.

    Args:
        stand_ins: the folder of framework headers.
        objects: compiled `.mm` files.
    """
    return [sys.executable, "-m", "softmetal.api_check", "--include", str(stand_ins), *map(str, objects)]


def _load(name: str) -> ModuleType:
    """Loads a module of softmetal without softmetal's `__init__`, which would build and register the device."""
    package = ModuleType("softmetal_without_device")
    package.__path__ = [str(_FOLDER)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{name}")
