"""Loads the compiled extension, which registers `torch.ops.torch_marlin_metal.*`."""

import importlib
import platform
from dataclasses import dataclass
from typing import Any

import torch

from torch_marlin_metal import interface

BUILD_COMMAND = "`pip install --no-build-isolation --force-reinstall --no-deps .` in the source tree"


def _load() -> Any:
    try:
        compiled: Any = importlib.import_module("torch_marlin_metal._C")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"torch_marlin_metal: no compiled extension for Python {platform.python_version()} is installed. "
            f"Build it: {BUILD_COMMAND}."
        ) from error
    except ImportError as error:  # its text may hold a symbol's name of hundreds of characters
        raise ImportError(
            f"torch_marlin_metal: the compiled extension does not load with torch {torch.__version__}, most likely "
            f"because it was built for another torch. Build it for this one: {BUILD_COMMAND}."
        ) from error
    built_for = compiled.torch_version
    if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(
            f"torch_marlin_metal: the extension was built for torch {built_for}, but this is torch "
            f"{torch.__version__}. Build it again: {BUILD_COMMAND}, or `pip install torch=={built_for}`."
        )
    difference = interface.first_difference(compiled)
    if difference is not None:
        raise ImportError(
            "torch_marlin_metal: the compiled extension was built from another version of the sources than the Python "
            f"files: {difference}. Build it again: {BUILD_COMMAND}, or `python setup.py build_ext --inplace` for an "
            "editable installation."
        )
    return compiled


def _read_saved_choices() -> None:
    from torch_marlin_metal.gpu.tuning.table import use_saved_once

    use_saved_once()


native = _load()
# The tuner's table is a file in the user's home. It is read when the planner first chooses a kernel for this machine's
# GPU, never at import.
native.set_tuned_loader(_read_saved_choices)


@dataclass(frozen=True)
class CpuCapability:
    """The instruction sets that the CPU kernels use on this machine.

    Attributes:
        isa: the instruction set in use: "portable", "avx2", "avx512", "amx" or "neon".
        reason: one sentence that says why.
        features: CPU features that the kernels check for and that the CPU and the operating system provide.
        available: instruction sets that `TORCH_MARLIN_METAL_CPU_ISA` can select on this machine.
    """

    isa: str
    reason: str
    features: tuple[str, ...]
    available: tuple[str, ...]


def cpu_capability() -> CpuCapability:
    """Returns the instruction set that the CPU kernels use, and why.

    Raises:
        RuntimeError: `TORCH_MARLIN_METAL_CPU_ISA` names an instruction set that is unknown or absent on this machine.
    """
    isa, reason, features, available = native.cpu_capability()
    return CpuCapability(isa, reason, tuple(features), tuple(available))
