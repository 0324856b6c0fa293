"""Runs Metal source on the executor from NumPy arrays: what the tests of the MSL library launch kernels with."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from softmetal.executor.build import build_executor
from softmetal.msl import compiler

_SLOTS = 31


class _Uint3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("length", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("read_only", ctypes.c_uint32),
        ("label", ctypes.c_char_p),
        ("initialised", ctypes.c_void_p),
    ]


class _Dispatch(ctypes.Structure):
    _fields_ = [
        ("library", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("threads_per_grid", _Uint3),
        ("threads_per_threadgroup", _Uint3),
        ("buffers", _Buffer * _SLOTS),
        ("threadgroup_bytes", ctypes.c_uint32 * _SLOTS),
        ("seed", ctypes.c_uint64),
        ("perturb_seed", ctypes.c_uint64),
        ("os_threads", ctypes.c_uint32),
        ("max_faults", ctypes.c_uint32),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint32), ("is_fatal", ctypes.c_uint32), ("message", ctypes.c_char_p)]


class MetalFault(Exception):
    """The executor found a fault; the text is its report."""


@functools.cache
def _executor() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_executor(Path(compiler.cache_folder()))), mode=ctypes.RTLD_GLOBAL)
    library.sm_library_open.restype = ctypes.c_void_p
    library.sm_library_find.restype = ctypes.c_void_p
    library.sm_library_find.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.sm_launch.restype = ctypes.c_void_p
    library.sm_free_result.argtypes = [ctypes.c_void_p]
    return library


class Library:
    """A compiled Metal source.

    Args:
        source: Metal Shading Language text.
        checked: instrumented for checked mode.
        constants, include_paths, defines: as for `compiler.compile_source`.
    """

    def __init__(
        self,
        source: str,
        *,
        checked: bool = False,
        constants: Mapping[str, str] | None = None,
        include_paths: Sequence[str] = (),
        defines: Sequence[str] = (),
    ) -> None:
        built = compiler.compile_source(
            source, checked=checked, constants=constants, include_paths=include_paths, defines=defines
        )
        error = ctypes.c_char_p()
        self._handle = _executor().sm_library_open(str(built.path).encode(), ctypes.byref(error))
        if not self._handle:
            raise RuntimeError(error.value)

    def run(
        self,
        kernel: str,
        *arguments: np.ndarray | None,
        grid: int | tuple[int, ...],
        group: int | tuple[int, ...] = 32,
        threadgroup_bytes: Sequence[int] = (),
        perturb_seed: int = 0,
        seed: int = 1,
    ) -> None:
        """Runs `kernel` over `grid` threads; array i is buffer i and is changed in place.

        Raises:
            MetalFault: the executor reported a fault.
        """
        found = _executor().sm_library_find(self._handle, kernel.encode())
        if not found:
            raise KeyError(f"no kernel '{kernel}' in the library")
        dispatch = _Dispatch(library=self._handle, kernel=found, seed=seed, perturb_seed=perturb_seed, os_threads=1)
        dispatch.threads_per_grid = _uint3(grid)
        dispatch.threads_per_threadgroup = _uint3(group)
        for slot, array in enumerate(arguments):
            if array is None:
                continue
            if not array.flags.c_contiguous:
                raise ValueError(f"argument {slot} is not contiguous")
            dispatch.buffers[slot] = _Buffer(array.ctypes.data, array.nbytes, 0, 0, None, None)
        for slot, size in enumerate(threadgroup_bytes):
            dispatch.threadgroup_bytes[slot] = size
        result = _executor().sm_launch(ctypes.byref(dispatch))
        try:
            header = ctypes.cast(result, ctypes.POINTER(ctypes.c_uint32))
            if header[0]:
                faults = ctypes.cast(result + 8, ctypes.POINTER(ctypes.POINTER(_Fault)))[0]
                raise MetalFault(faults[0].message.decode())
        finally:
            _executor().sm_free_result(result)


def _uint3(value: int | tuple[int, ...]) -> _Uint3:
    sizes = (value,) if isinstance(value, int) else value
    return _Uint3(*(*sizes, 1, 1)[:3])
