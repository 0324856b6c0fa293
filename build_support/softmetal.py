"""All that the build uses of `softmetal/`, the software Metal device, which is test equipment and in no wheel."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / "softmetal"

#: A folder of headers for each of Apple's frameworks that the host uses, checked against Apple's metadata.
STAND_INS = _FOLDER / "runtime" / "include"


def link_with_mps_sources(command: Any, extension: Any, mps_sources: list[str]) -> None:
    """Links the extension that `command` has just built once more, with its MPS backend for the software device.

    Args:
        command: the running build_ext.
        extension: the extension, built.
        mps_sources: the sources that the ordinary Linux build leaves out.
    """
    _load("extension").link_with_mps_sources(command, extension, mps_sources)


def api_check_command(stand_ins: Path, objects: Iterable[Path]) -> list[str]:
    """Returns the command that compares headers, and what objects call, with Apple's metadata; it prints a summary.

    Args:
        stand_ins: the folder of framework headers.
        objects: compiled `.mm` files.
    """
    return [sys.executable, "-m", "softmetal.api_check", "--include", str(stand_ins), *map(str, objects)]


def _load(name: str) -> ModuleType:
    """Loads a module of the package without the package's `__init__`, which would build and register the device."""
    package = ModuleType("softmetal_without_device")
    package.__path__ = [str(_FOLDER)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{name}")
