"""Builds the software Metal device.

The build needs clang-19, GNU libobjc and BlocksRuntime. It writes to `OUTPUT` (`msl/tools.py`). If a source, a header,
a flag or the torch version changes, the next build repeats the affected parts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from .msl.tools import OUTPUT

HERE = Path(__file__).resolve().parent
RUNTIME = HERE / "runtime"
COMPILER = "clang++-19"
PACKAGES = "clang-19 libobjc-$(g++ -dumpversion)-dev libblocksruntime-dev binutils"  # libobjc is part of GCC
# The device implements the ATen/mps headers of these releases of torch: hooks, allocator, streams and profiler.
TORCH_RELEASES = ("2.13", "2.14", "2.15")

_T, _U = TypeVar("_T"), TypeVar("_U")


class Unavailable(RuntimeError):
    """The software Metal device cannot be built or used on this machine. The message names the reason."""


def require_tools() -> None:
    """Raises `Unavailable` unless this is Linux with the compiler, the Objective-C runtime and the right torch."""
    if sys.platform != "linux":
        raise Unavailable(f"softmetal: the software Metal device runs on Linux only, this is {sys.platform}")
    missing = [tool for tool in (COMPILER, "addr2line") if shutil.which(tool) is None]
    if not missing:
        missing = [name for name in ("libobjc.so", "libBlocksRuntime.so") if not _library_directory(name)]
    if missing:
        raise Unavailable(f"softmetal: {', '.join(missing)} not found; install with: apt-get install {PACKAGES}")
    import torch

    if ".".join(torch.__version__.split(".")[:2]) not in TORCH_RELEASES:
        raise Unavailable(f"softmetal: needs torch {' or '.join(TORCH_RELEASES)}, this is torch {torch.__version__}")


def _library_directory(name: str) -> str | None:
    found = subprocess.run([COMPILER, f"--print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    return str(path.parent) if path.is_absolute() else None


def compile_flags() -> list[str]:
    """Returns the flags for Objective-C++ that includes torch's headers and the stand-in headers."""
    import torch

    torch_include = Path(torch.__file__).parent / "include"
    return [
        *("-std=c++20", "-fPIC", "-O1", "-g1", "-Wall", "-Wextra", "-fblocks", "-fexceptions"),
        *("-x", "objective-c++", "-fobjc-runtime=gcc", "-fconstant-string-class=NSConstantString"),
        f"-I{RUNTIME / 'include'}",
        *("-isystem", str(torch_include), "-isystem", str(torch_include / "torch/csrc/api/include")),
        # GCC's directory contains <objc/...>, but also intrinsics that clang cannot read. It therefore comes after
        # clang's own.
        *("-idirafter", f"{_library_directory('libobjc.so')}/include"),
    ]


def link_flags() -> list[str]:
    """Returns the flags that link Objective-C++ with torch."""
    import torch

    torch_lib = Path(torch.__file__).parent / "lib"
    # The executor is loaded before this library and defines the sm_* functions, so they may be undefined here.
    return [
        *("-shared", f"-L{torch_lib}", f"-Wl,-rpath,{torch_lib}", "-ltorch_cpu", "-lc10"),
        *(f"-L{_library_directory('libobjc.so')}", "-lobjc", "-lBlocksRuntime", "-ldl"),
    ]


def run_tool(command: list[str]) -> None:
    """Runs a compiler or linker. If the tool fails, raises RuntimeError with the tool's messages."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"softmetal: build failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


@contextmanager
def locked() -> Iterator[None]:
    """Holds a lock in a `with` block, so that only one process at a time builds into `OUTPUT`."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with (OUTPUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def side_by_side(make: Callable[[_T], _U], parts: Iterable[_T]) -> list[_U]:
    """Returns the results of `make` for all parts, in their order. The calls run in parallel threads."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(make, parts))


def _digest(*parts: object) -> str:
    text = hashlib.sha256()
    for part in parts:
        text.update(part.read_bytes() if isinstance(part, Path) else repr(part).encode())
        text.update(b"\0")
    return text.hexdigest()[:16]


def _build_runtime() -> Path:
    import torch

    headers = sorted(RUNTIME.rglob("*.h")) + sorted((HERE / "executor").glob("*.h"))
    common = _digest(torch.__version__, compile_flags(), *headers)

    def compiled(source: Path) -> Path:
        target = OUTPUT / f"{source.stem}-{_digest(common, source)}.o"
        if not target.exists():
            for old in OUTPUT.glob(f"{source.stem}-*.o"):
                old.unlink()
            partial = target.with_suffix(".partial")
            run_tool([COMPILER, *compile_flags(), "-c", str(source), "-o", str(partial)])
            partial.rename(target)
        return target

    objects = side_by_side(compiled, sorted(RUNTIME.rglob("*.mm")))
    library, stamp = OUTPUT / "libsoftmetal.so", OUTPUT / "libsoftmetal.stamp"
    wanted = _digest(link_flags(), [path.name for path in objects])
    if not library.exists() or not stamp.exists() or stamp.read_text() != wanted:
        partial = library.with_suffix(".partial")
        run_tool([COMPILER, *map(str, objects), *link_flags(), "-o", str(partial)])
        partial.rename(library)
        stamp.write_text(wanted)
    return library


def build_device() -> Path:
    """Builds the outdated parts of the device library and returns its path. Load the executor before this library.

    Raises:
        Unavailable: a tool or package is missing.
        RuntimeError: a source does not compile. The compiler's messages follow.
    """
    require_tools()
    with locked():
        if not (OUTPUT / "libsoftmetal.so").exists():
            print(f"softmetal: building the device into {OUTPUT}, which takes a minute", file=sys.stderr, flush=True)
        return _build_runtime()
