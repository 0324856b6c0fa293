"""Runs Metal kernels on NumPy arrays: the software device without torch.

Example:
    >>> library = compile("kernel void twice(device float* x, uint i [[thread_position_in_grid]]) { x[i] *= 2; }")
    >>> x = np.arange(4, dtype=np.float32)
    >>> library.kernel("twice").launch(threads=4, group=4, buffers=[x])
"""

from __future__ import annotations

import ctypes as c
import mmap
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .executor import bindings as api
from .executor.bindings import executor
from .msl.compiler import DEFAULT_FILE_NAME, DEFAULT_VERSION, compile_source
from .msl.fast_math import PRECISE, SAFE, Math
from .msl.tensor import INCLUDE as TENSOR_HEADERS
from .msl.tools import CompileError
from .reports import Counters, Fault, FaultKind, KernelFault, KernelWarning, read_counters, read_faults

__all__ = [
    "Buffer",
    "CompileError",
    "Counters",
    "Fault",
    "FaultKind",
    "Kernel",
    "KernelFault",
    "KernelWarning",
    "Library",
    "compile",
]

Array = npt.NDArray[Any]
Size = int | Sequence[int]
Constants = Mapping[str | int, bool | int | float | Sequence[int | float]]
_MAP_NORESERVE = 0x4000  # value on Linux; Python 3.11's mmap module does not define it


class Buffer:
    """An array that is bound to a kernel at a byte offset. Records which bytes have been written.

    Args:
        array: a C-contiguous array, which kernels write in place.
        offset: where the kernel's pointer points, in bytes from the start of the array.
        initialised: False if the memory is treated as never written, so that a read before a write is a fault.
    """

    def __init__(self, array: Array, offset: int = 0, *, initialised: bool = True) -> None:
        if not array.flags.c_contiguous:
            raise ValueError("Buffer: array: expected a C-contiguous array")
        self.array = array
        self.offset = offset
        self.written = None if initialised else np.zeros(max(array.nbytes, 1), np.uint8)

    @classmethod
    def empty(cls, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Buffer:
        """Allocates uninitialised device memory."""
        array: Array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        return cls(array, initialised=False)

    @classmethod
    def sparse(cls, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Buffer:
        """Makes a buffer of zeros that may be larger than the machine's memory: only written pages are allocated."""
        count = int(np.prod(shape, dtype=np.int64))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, count * np.dtype(dtype).itemsize, flags=flags)
        return cls(np.frombuffer(memory, dtype).reshape(shape))


Bound = Array | tuple[Array, int] | bytes | Buffer | None


class Kernel:
    """One kernel of a library."""

    def __init__(self, library: Library, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self.name: str = handle.contents.name.decode()
        self.max_total_threads: int = handle.contents.max_total_threads or 1024
        self.static_threadgroup_bytes: int = handle.contents.static_threadgroup_bytes
        self.arguments = [handle.contents.arguments[i] for i in range(handle.contents.argument_count)]

    def launch(
        self,
        *,
        group: Size,
        groups: Size | None = None,
        threads: Size | None = None,
        buffers: Sequence[Bound] | Mapping[int, Bound] = (),
        threadgroup_memory: Mapping[int, int] | None = None,
        resident: Sequence[Array | Buffer] = (),
        seed: int | None = None,
        perturb_seed: int = 0,
        os_threads: int = 0,
        watchdog: float = 0,
        raise_faults: bool = True,
    ) -> Counters:
        """Runs the kernel and waits for it.

        Args:
            group: threads per threadgroup.
            groups: threadgroups per grid. Give either `groups` or `threads`.
            threads: threads per grid. The last threadgroups may then be smaller.
            buffers: one entry for each slot: an array, (array, byte offset), bytes (read-only data), a Buffer, or None.
            threadgroup_memory: bytes of each [[threadgroup(n)]] argument.
            resident: arrays that the kernel reaches only through addresses in other buffers. In Metal, `useResource`
                names them.
            seed: seed of the order of threads in checked mode. Messages name the seed. None means SOFTMETAL_SEED, or a
                random seed if that is not set.
            perturb_seed: seed of the perturbation of inexact functions, within Metal's limits; 0 means no perturbation.
            os_threads: OS threads in fast mode; 0 means SOFTMETAL_THREADS, or one for each core.
            watchdog: seconds of processor time after which the launch ends with a report. 0 means SOFTMETAL_WATCHDOG,
                or 120. A negative number means no limit.
            raise_faults: whether a fault raises an error. If False, faults are stored in `last_faults`.

        Returns:
            The counts of the launch.

        Raises:
            KernelFault: the kernel broke a rule of Metal.

        Warns: KernelWarning: the kernel did something that Metal allows but that is usually a mistake.
        """
        if (groups is None) == (threads is None):
            raise ValueError("launch: groups, threads: expected exactly one of them")
        size = _three(group)
        grid = _three(threads if threads is not None else groups or 0)
        if threads is None:
            grid = tuple(g * s for g, s in zip(grid, size, strict=True))
        dispatch = api.Dispatch(library=self._library.handle, kernel=self._handle)
        dispatch.threads_per_grid = api.Uint3(*grid)
        dispatch.threads_per_threadgroup = api.Uint3(*size)
        slots = buffers.items() if isinstance(buffers, Mapping) else enumerate(buffers)
        keep = [_bind(dispatch.buffers[slot], bound) for slot, bound in slots]
        dispatch.resident_count = len(resident)
        dispatch.resident = (api.Buffer * len(resident))()
        keep += [_bind(dispatch.resident[i], bound) for i, bound in enumerate(resident)]
        for index, count in (threadgroup_memory or {}).items():
            dispatch.threadgroup_bytes[index] = count
        if seed is None:
            seed = int(os.environ.get("SOFTMETAL_SEED", random.getrandbits(32)))
        dispatch.seed, dispatch.perturb_seed, dispatch.os_threads = seed, perturb_seed, os_threads
        dispatch.watchdog = watchdog
        result = executor().sm_launch(dispatch)
        del keep
        try:
            self.last_faults = read_faults(result.contents)
            counters = read_counters(result.contents.counters)
        finally:
            executor().sm_free_result(result)
        if not raise_faults:
            return counters
        if faults := [f for f in self.last_faults if not f.kind.is_warning]:
            raise KernelFault(faults)
        for fault in self.last_faults:
            warnings.warn(f"software Metal device: {fault.message}", KernelWarning, stacklevel=2)
        return counters


class Library:
    """A compiled library."""

    def __init__(self, path: str) -> None:
        error = c.c_void_p()
        self.handle = executor().sm_library_open(path.encode(), error)
        if not self.handle:
            raise RuntimeError(f"{path}: {_text(error)}")
        self.path = path
        self.checked = bool(executor().sm_library_is_checked(self.handle))
        count = executor().sm_library_kernel_count(self.handle)
        handles = [executor().sm_library_kernel(self.handle, i) for i in range(count)]
        self._kernels = {h.contents.name.decode(): h for h in handles}

    @property
    def names(self) -> list[str]:
        """The host names of the kernels."""
        return list(self._kernels)

    @property
    def constants(self) -> dict[str, tuple[int, str, bool]]:
        """The function constants: name -> (index, type, whether this specialization has a value)."""
        count = executor().sm_library_constant_count(self.handle)
        found = [executor().sm_library_constant(self.handle, i).contents for i in range(count)]
        return {f.name.decode(): (f.index, f.type.decode(), bool(f.is_defined)) for f in found}

    def kernel(self, name: str) -> Kernel:
        """Returns the kernel with a host name. Raises KeyError if there is none."""
        if name not in self._kernels:
            raise KeyError(f"kernel: expected one of {', '.join(self._kernels)}, got {name!r}")
        return Kernel(self, self._kernels[name])


def compile(
    source: str,
    *,
    constants: Constants | None = None,
    checked: bool = False,
    kernel: str | None = None,
    file_name: str = DEFAULT_FILE_NAME,
    include_paths: Sequence[str] = (),
    defines: Sequence[str] = (),
    math: str = SAFE,
    functions: str = PRECISE,
    version: int = DEFAULT_VERSION,
) -> Library:
    """Compiles Metal source for the device. Repeated requests return the same library.

    Args:
        source: Metal Shading Language text.
        constants: function constants by name or index.
        checked: whether to compile for checked mode, which examines every access and is slower than fast mode.
        kernel: the only kernel to compile. This saves time if a library has function constants and many kernels.
        file_name: the source's name in messages.
        include_paths: folders for the source's own includes.
        defines: macros, "NAME" or "NAME=VALUE".
        math: the math mode: "safe", "relaxed" or "fast". Metal's default is "fast". `varied(seed)` of
            `softmetal.msl.fast_math` is safe mode with a seed for the choices that Metal leaves open.
        functions: "precise" or "fast". Decides whether `exp` is `precise::exp` or `fast::exp`, and likewise for the
            other math functions. Metal's default is "fast".
        version: the language version as in `__METAL_VERSION__`: 310 is MSL 3.1. Tensors need 400.

    Raises:
        CompileError: the source does not compile. The message contains the compiler's messages.
    """
    values = constant_texts(constants)
    paths = tuple(map(str, include_paths))
    return _compile(source, values, checked, kernel, file_name, paths, tuple(defines), Math(math, functions), version)


def constant_texts(constants: Constants | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((str(k), _literal(v)) for k, v in (constants or {}).items()))


@lru_cache(maxsize=256)
def _compile(
    source: str,
    values: tuple[tuple[str, str], ...],
    checked: bool,
    kernel: str | None,
    file_name: str,
    include_paths: tuple[str, ...],
    defines: tuple[str, ...],
    math: Math,
    version: int,
) -> Library:
    built = compile_source(
        source,
        file_name=file_name,
        constants=dict(values),
        include_paths=(*include_paths, str(TENSOR_HEADERS)),
        defines=defines,
        checked=checked,
        kernel=kernel,
        math=math,
        version=version,
    )
    return Library(str(built.path))


def _literal(value: bool | int | float | Sequence[int | float]) -> str:
    if isinstance(value, Sequence):
        return "{" + ",".join(_literal(v) for v in value) + "}"
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    return float(value).hex() if isinstance(value, (float, np.floating)) else str(int(value))


def _three(size: Size) -> tuple[int, ...]:
    values = (size,) if isinstance(size, (int, np.integer)) else tuple(size)
    return tuple(int(v) for v in (*values, 1, 1)[:3])


def _text(pointer: c.c_void_p) -> str:
    text = c.string_at(pointer.value or 0).decode() if pointer else ""
    executor().sm_free_text(pointer)
    return text


def _bind(slot: api.Buffer, bound: Bound) -> object:
    """Fills the slot. Returns an object that owns the memory."""
    if bound is None:
        return None
    if isinstance(bound, bytes):
        data = np.frombuffer(bound, np.uint8).copy()
        slot.base, slot.length, slot.read_only = data.ctypes.data, data.nbytes, 1
        return data
    if not isinstance(bound, Buffer):
        bound = Buffer(*bound) if isinstance(bound, tuple) else Buffer(bound)
    slot.base, slot.length, slot.offset = bound.array.ctypes.data, bound.array.nbytes, bound.offset
    slot.initialised = None if bound.written is None else bound.written.ctypes.data
    return bound
