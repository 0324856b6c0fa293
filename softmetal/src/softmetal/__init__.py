"""The software Metal device: `device="mps"` on Linux, for tests.

`softmetal.install()` makes the device. `import softmetal` alone builds nothing and changes nothing.

`SOFTMETAL_CHECKED=1` starts in checked mode, `SOFTMETAL_SEED=n` sets the first seed, and `MTL_DEBUG_LAYER=1` turns on
the rules of Metal's validation layer, as on a Mac.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import device, reports, shader, streams
from .build import Unavailable, build_device
from .extension import build_extension, extension_path, find_extensions
from .native import Library

__all__ = [
    "Counters",
    "StreamCounts",
    "Unavailable",
    "autorelease_pools",
    "build_extension",
    "checked",
    "compiles",
    "compiles_concurrently",
    "counters",
    "extension_path",
    "failing_allocation",
    "failing_command_buffer",
    "faults",
    "install",
    "is_checked",
    "seed",
    "stream",
    "stream_counts",
    "thread_limit",
    "validated",
]


def _host_alias(library: Library, storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Returns a CPU storage over the bytes of an mps storage. The CPU storage keeps the mps storage alive."""
    if storage.device.type != "mps" or not storage.nbytes():
        raise RuntimeError(f"_host_alias_storage: expected a non-empty storage on mps, got one on {storage.device}")
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(library.contents(storage.data_ptr()))
    memory.owner = storage  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _storage_to_mps(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Copies a storage to mps. torch.load calls `UntypedStorage.mps`, and a torch without Metal has no such method."""
    if storage.device.type == "mps":
        return storage
    return torch.empty(0, dtype=torch.uint8).set_(storage).to("mps").untyped_storage()  # type: ignore[call-overload]


_installed: Library | None = None


def install() -> None:
    """Makes the software Metal device this process's `device="mps"`. A second call does nothing.

    Call it before any code asks torch whether MPS is available, and before the import of extensions with an MPS
    backend. On first use, and after a change of its sources, the function builds the device, which takes a minute.

    Raises:
        Unavailable: the device cannot be built or used here. The message names what to install.
        ImportError: an extension that was built for the device is already loaded, without its MPS backend.
        RuntimeError: torch was asked about MPS before, or another copy of the device is loaded.

    Example:
        >>> import softmetal
        >>> softmetal.install()
        >>> import torch
        >>> torch.ones(2, device="mps").sum().item()
        2.0
    """
    global _installed
    if _installed is None:
        _installed = _load()


def _device() -> Library:
    if _installed is None:
        raise RuntimeError(
            "softmetal: there is no device yet: call softmetal.install() before anything uses torch's mps"
        )
    return _installed


def _synchronize() -> None:
    """Waits for the device. Raises before install(), because torch.mps would cache that there is no MPS."""
    _device()
    torch.mps.synchronize()


def _load() -> Library:
    if hasattr(ctypes.CDLL(None), "softmetal_is_checked"):
        raise RuntimeError("softmetal: another copy of the device is loaded already; a process can have only one")
    if torch.backends.mps.is_built():
        raise Unavailable("softmetal: this torch has a Metal backend of its own")
    path = build_device()
    find_extensions()
    library = Library(path)
    if not torch._C._mps_is_available():
        raise RuntimeError(
            "softmetal: torch was asked about MPS before `softmetal.install()` and keeps its answer for the whole "
            "process: call softmetal.install() first"
        )
    torch.backends.mps.is_available.cache_clear()
    native: Any = torch._C  # the attributes below do not exist in a CPU build
    native._has_mps = True
    native._mps_compileShader = lambda source: shader.ShaderLibrary(library, source)
    native._mps_host_alias_storage = lambda storage: _host_alias(library, storage)
    native._mps_get_core_count = lambda: 8
    native._mps_get_name = lambda: "softmetal"
    streams.install()
    torch.UntypedStorage.mps = _storage_to_mps  # type: ignore[method-assign]
    return library


def is_checked() -> bool:
    """Returns whether kernels that are encoded now will run in checked mode."""
    return bool(_device().is_checked())


@contextlib.contextmanager
def checked(enabled: bool = True) -> Iterator[None]:
    """Runs the kernels of a `with` block in checked mode, or in fast mode if `enabled` is False.

    At its end, the block waits for these kernels.

    Raises:
        RuntimeError: a kernel broke a rule of Metal. The message is the report.
    """
    before = is_checked()
    _synchronize()
    _device().set_checked(int(enabled))
    try:
        yield
        _synchronize()
    finally:
        _device().set_checked(int(before))


@contextlib.contextmanager
def validated(enabled: bool = True) -> Iterator[None]:
    """Enforces in a `with` block the rules that only Metal's API validation enforces, as `MTL_DEBUG_LAYER=1` does.

    There is one such rule: a kernel's buffer argument may not be nil. If a program breaks it, a Mac ends the process.
    The device raises RuntimeError, as for the rules that are always enforced.
    """
    before = _device().set_validates(int(enabled))
    try:
        yield
    finally:
        _device().set_validates(before)


def seed(value: int) -> None:
    """Seeds the order in which threads run.

    The next dispatch uses `value`, and each later dispatch adds one. Reports name the seed.
    """
    _synchronize()
    _device().set_seed(value)


@contextlib.contextmanager
def thread_limit(most: int) -> Iterator[None]:
    """Limits the threads per threadgroup in a `with` block, as a GPU does for a kernel that needs many registers."""
    before = _device().set_thread_limit(most)
    try:
        yield
    finally:
        _device().set_thread_limit(before)


@contextlib.contextmanager
def stream(number: int) -> Iterator[None]:
    """Makes this thread encode to another of PyTorch's streams in a `with` block, as in torch 2.14 and later.

    Work on different streams is not ordered. `torch.mps.synchronize()` waits for all streams.

    Args:
        number: 1 to 32 for a stream of PyTorch's pool, or 0 for the default stream. Every thread starts with 0.
    """
    before = _device().stream()
    error = _device().take_text(_device().set_stream(number))
    if error is not None:
        raise ValueError(error)
    try:
        yield
    finally:
        _device().set_stream(before)


@dataclass(frozen=True)
class StreamCounts:
    """Counts of all streams since the process started.

    Attributes:
        commits: commits of command buffers with commands.
        empty_commits: commits of command buffers without commands.
        waits: commits that waited for the GPU.
        encoders: compute encoders, which several kernels may share.
        most_in_a_commit: number of commands in the largest command buffer.
        uncommitted: commands that are encoded and not yet committed.
    """

    commits: int
    empty_commits: int
    waits: int
    encoders: int
    most_in_a_commit: int
    uncommitted: int


def stream_counts() -> StreamCounts:
    """Returns the counts, without a commit or a wait."""
    counts = (ctypes.c_uint64 * len(dataclasses.fields(StreamCounts)))()
    _device().stream_counts(counts)
    return StreamCounts(*counts)


def autorelease_pools() -> int:
    """Returns the number of this thread's autorelease pools that are not yet drained: 0 between calls of the host."""
    count: int = _device().autorelease_pools()
    return count


@dataclass(frozen=True)
class Compile:
    """One compile. `kind` is "library" or "pipeline"; `text` is the source, or the name of the pipeline's function."""

    kind: str
    text: str


def compiles_concurrently() -> bool:
    """Returns whether the host has set the device's `shouldMaximizeConcurrentCompilation`."""
    return bool(_device().compiles_concurrently())


_compile_hook = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)


@contextlib.contextmanager
def compiles(answer: Callable[[Compile], str | None] | None = None) -> Iterator[list[Compile]]:
    """Yields a list of all compiles inside the block. Each compile is appended when it begins.

    Args:
        answer: called before each compile, on the thread that compiles. If it returns a text, the compile fails and the
            text is the error message.
    """
    seen: list[Compile] = []

    def hook(is_pipeline: int, text: bytes, error: int, capacity: int) -> None:
        compile = Compile("pipeline" if is_pipeline else "library", text.decode())
        seen.append(compile)
        message = answer(compile) if answer else None
        if message:
            data = message.encode()[: capacity - 1] + b"\0"
            ctypes.memmove(error, data, len(data))

    kept = _compile_hook(hook)
    _device().set_compile_hook(kept)
    try:
        yield seen
    finally:
        _device().set_compile_hook(None)


@contextlib.contextmanager
def failing_allocation(count: int) -> Iterator[Callable[[], bool]]:
    """Makes one allocation of mps memory in a `with` block fail, as if memory were full.

    Args:
        count: the number of successful allocations before the failure.

    Yields:
        A function that tells, after the block, whether the allocation has failed.
    """
    _device().fail_allocation(count)
    ended: list[int] = []
    try:
        yield lambda: bool(ended) and ended[0] < 0
    finally:
        ended.append(_device().fail_allocation(-1))


@contextlib.contextmanager
def failing_command_buffer(message: str, code: int = 1) -> Iterator[None]:
    """Inside a `with` block, makes the first command buffer that has commands fail. Its commands do not run.

    At its end, the block waits for the device. torch 2.15 and later then raise an error for the failure. The block
    drops that error, so that a program sees the report of the tested package.

    Args:
        message: the error's description.
        code: the error's code in `MTLCommandBufferErrorDomain`: 1 internal, 2 time-out, 8 out of memory.
    """
    _synchronize()
    _device().fail_command_buffer(code, message.encode())
    try:
        yield
        try:
            _synchronize()
        except RuntimeError as error:
            if message not in str(error):
                raise
    finally:
        _device().fail_command_buffer(0, b"")


def faults() -> list[str]:
    """Returns one line for each fault since the last call, and clears the faults and the counters."""
    with contextlib.suppress(RuntimeError):
        _synchronize()
    text = _device().take_text(_device().faults())
    _device().clear()
    return text.split("\n") if text else []


@dataclass(frozen=True)
class Counters(device.Counters):
    """The counts of one dispatch, with its kernel and its seed."""

    kernel: str
    seed: int


def counters() -> list[Counters]:
    """Waits for all encoded work and returns the counters of the last 256 dispatches, oldest first."""
    _synchronize()
    found = []
    for i in range(_device().record_count()):
        kernel, number = ctypes.c_char_p(), ctypes.c_uint64()
        result = _device().record(i, ctypes.byref(kernel), ctypes.byref(number)).contents
        counts = vars(reports.read_counters(result.counters))
        found.append(Counters(kernel=(kernel.value or b"").decode(), seed=number.value, **counts))
    return found
