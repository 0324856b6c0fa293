"""The software Metal device: `device="mps"` on Linux, for tests.

`import softmetal`, before anything asks torch whether MPS is available and before `import torch_marlin_metal`, builds
the device if a source changed, loads it and registers it with torch. `Unavailable` says what to install.

Environment: `SOFTMETAL_CHECKED=1` starts in checked mode, `SOFTMETAL_SEED=n` sets the first seed.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import device, shader
from .build import Unavailable, build_device
from .extension import use_test_build
from .native import Library

__all__ = ["Counters", "Unavailable", "checked", "counters", "faults", "is_checked", "seed", "thread_limit"]


def _host_alias(library: Library, storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A CPU storage over the bytes of an mps storage, which it keeps alive."""
    if storage.device.type != "mps" or not storage.nbytes():
        raise RuntimeError(f"_host_alias_storage: expected a non-empty storage on mps, got one on {storage.device}")
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(library.contents(storage.data_ptr()))
    memory.owner = storage  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _storage_to_mps(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """`UntypedStorage.mps`, which torch.load calls: a build of torch without Metal makes no mps storages itself."""
    if storage.device.type == "mps":
        return storage
    return torch.empty(0, dtype=torch.uint8).set_(storage).to("mps").untyped_storage()  # type: ignore[call-overload]


def _load() -> Library:
    if hasattr(ctypes.CDLL(None), "softmetal_is_checked"):
        raise RuntimeError("softmetal: another copy of the device is loaded already; a process can have one")
    if torch.backends.mps.is_built():
        raise Unavailable("softmetal: this torch has a Metal backend of its own")
    library = Library(build_device())
    if not torch._C._mps_is_available():
        raise RuntimeError(
            "softmetal: torch was asked about MPS before `import softmetal`, which fixes the answer for the process: "
            "import softmetal first"
        )
    torch.backends.mps.is_available.cache_clear()
    native: Any = torch._C  # what a CPU build lacks
    native._has_mps = True
    native._mps_compileShader = lambda source: shader.compile_shader(library, source)
    native._mps_loadMetalllib = lambda data: shader.load_metallib(library, data)
    native._mps_loadMetallibFromPath = lambda path: shader.load_metallib_from_path(library, path)
    native._mps_host_alias_storage = lambda storage: _host_alias(library, storage)
    native._mps_get_core_count = lambda: 8
    native._mps_get_name = lambda: "softmetal"
    torch.UntypedStorage.mps = _storage_to_mps  # type: ignore[method-assign]
    return library


_library = _load()
use_test_build()


def is_checked() -> bool:
    """Whether kernels that are encoded now run in checked mode."""
    return bool(_library.is_checked())


@contextlib.contextmanager
def checked(enabled: bool = True) -> Iterator[None]:
    """Runs the kernels encoded in the block in checked mode (or, with False, in fast mode).

    Leaving the block waits for them; a fault raises RuntimeError with its report.
    """
    before = is_checked()
    torch.mps.synchronize()
    _library.set_checked(int(enabled))
    try:
        yield
        torch.mps.synchronize()
    finally:
        _library.set_checked(int(before))


def seed(value: int) -> None:
    """Seeds the interleaving: the next dispatch takes `value`, each later one the next number. Reports name it."""
    torch.mps.synchronize()
    _library.set_seed(value)


@contextlib.contextmanager
def thread_limit(most: int) -> Iterator[None]:
    """In the block a threadgroup has at most so many threads, as for a kernel that takes a GPU's registers."""
    before = _library.set_thread_limit(most)
    try:
        yield
    finally:
        _library.set_thread_limit(before)


def faults() -> list[str]:
    """Reports of the faults since the last call, each one line; then forgets them, and the counters."""
    with contextlib.suppress(RuntimeError):
        torch.mps.synchronize()
    text = _library.take_text(_library.faults())
    _library.clear()
    return text.split("\n") if text else []


@dataclass(frozen=True)
class Counters(device.Counters):
    """What one dispatch did: the counts of `device.Counters`, with its kernel and the seed of its interleaving."""

    kernel: str
    seed: int


def counters() -> list[Counters]:
    """Counters of the latest dispatches (at most 256), oldest first, once all encoded work has run."""
    torch.mps.synchronize()
    found = []
    for i in range(_library.record_count()):
        kernel, number = ctypes.c_char_p(), ctypes.c_uint64()
        result = _library.record(i, ctypes.byref(kernel), ctypes.byref(number)).contents
        counts = vars(device.read_counters(result.counters))
        found.append(Counters(kernel=(kernel.value or b"").decode(), seed=number.value, **counts))
    return found
