"""Finds the Metal libraries in the macOS wheels of MLX and PyTorch. The files are stored in `apple.wheels.CACHE`."""

from __future__ import annotations

import functools
import tempfile
import zipfile
from pathlib import Path

from ..apple import wheels
from ..apple.macho import MachO

_DYLIB = "torch/lib/libtorch_cpu.dylib"
TORCH_SECTION = "metal_basic"  # the kernels for macOS 14; the section metal_40 contains the same kernels for macOS 26


MLX = "mlx-metal"
MLX_WITH_TENSORS = "mlx-metal-macos-26"  # compiled at MSL 4.0, with kernels for the tensor units


@functools.cache
def mlx_library(wheel: str = MLX) -> Path:
    """Returns the path of the metallib in one of MLX's wheels.

    Raises:
        WheelUnavailable: the wheel is not cached and cannot be downloaded.
    """
    return wheels.unpack(wheel) / "mlx" / "lib" / "mlx.metallib"


@functools.cache
def mlx_include(wheel: str = MLX) -> Path:
    """Returns the folder of the Metal source in one of MLX's wheels."""
    return wheels.unpack(wheel) / "mlx" / "include"


def torch_library() -> Path:
    """Copies PyTorch's metallib out of a section of PyTorch's dylib. Returns the path of the copy.

    Raises:
        WheelUnavailable: the wheel is not cached and cannot be downloaded.
    """
    return _torch_library("torch-macos")


def newest_torch_library() -> Path:
    """Like `torch_library`, but for the newest PyTorch that the mps backend supports."""
    return _torch_library("torch-macos-2.15.0")


@functools.cache
def _torch_library(name: str) -> Path:
    wheel = wheels.fetch(name)
    path = wheel.with_name(f"{wheel.stem}.{TORCH_SECTION}.metallib")
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # several test processes may copy at once
            dylib, section = Path(folder) / "torch.dylib", Path(folder) / path.name
            with zipfile.ZipFile(wheel) as archive, archive.open(_DYLIB) as packed:
                dylib.write_bytes(packed.read())
            section.write_bytes(MachO(dylib).section(TORCH_SECTION))
            section.replace(path)
    return path
