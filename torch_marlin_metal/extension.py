"""Loads the compiled extension, which registers `torch.ops.torch_marlin_metal.*`."""

from dataclasses import dataclass
from typing import Any

import torch


def _load() -> Any:
    try:
        from torch_marlin_metal import _C  # type: ignore[attr-defined]
    except ImportError as error:
        raise ImportError(
            f"torch_marlin_metal: the compiled extension does not load with torch {torch.__version__} ({error}). "
            "Build it for this torch: `pip install --no-build-isolation .` in the source tree."
        ) from error
    running = torch.__version__.split("+")[0]
    if _C.torch_version != running:
        raise ImportError(
            f"torch_marlin_metal: the extension was built for torch {_C.torch_version}, but this is torch {running}. "
            "Build it again: `pip install --no-build-isolation .` in the source tree."
        )
    return _C


native = _load()


@dataclass(frozen=True)
class CpuCapability:
    """What the CPU kernels use on this machine.

    Attributes:
        isa: instruction-set family in use: "portable", "avx2", "avx512", "amx" or "neon".
        reason: one sentence that says why.
        features: CPU features that the kernels look at, present and enabled by the operating system.
        available: families that `TORCH_MARLIN_METAL_CPU_ISA` can force on this machine.
    """

    isa: str
    reason: str
    features: tuple[str, ...]
    available: tuple[str, ...]


def cpu_capability() -> CpuCapability:
    """Says which instruction-set family the CPU kernels use, and why.

    Raises:
        RuntimeError: `TORCH_MARLIN_METAL_CPU_ISA` names a family that is unknown or absent on this machine.
    """
    isa, reason, features, available = native.cpu_capability()
    return CpuCapability(isa, reason, tuple(features), tuple(available))
