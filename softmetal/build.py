"""Builds the software Metal device and, for the project's setup.py, the Objective-C++ host against it.

Needs clang-19, GNU libobjc and BlocksRuntime; nothing of it is shipped. Outputs go to `build/softmetal/` of the
repository and are rebuilt when a source, header, flag or the torch version changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
RUNTIME = HERE / "runtime"
OUTPUT = HERE.parents[1] / "build" / "softmetal"
EXTENSION = OUTPUT / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"  # torch_marlin_metal._C with its MPS backend
COMPILER = "clang++-19"
PACKAGES = "clang-19 libobjc-12-dev libblocksruntime-dev binutils"
TORCH_SERIES = "2.13."  # hooks, allocator and stream glue follow this version's headers

_T, _U = TypeVar("_T"), TypeVar("_U")


class Unavailable(RuntimeError):
    """The software Metal device cannot be built or used on this machine; the message says what is missing."""


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

    if not torch.__version__.startswith(TORCH_SERIES):
        raise Unavailable(f"softmetal: needs torch {TORCH_SERIES}x, this is torch {torch.__version__}")


def _library_directory(name: str) -> str | None:
    found = subprocess.run([COMPILER, f"--print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    return str(path.parent) if path.is_absolute() else None


def compile_flags() -> list[str]:
    """Flags for Objective-C++ that includes torch's and the stand-in headers."""
    import torch

    torch_include = Path(torch.__file__).parent / "include"
    return [
        *("-std=c++20", "-fPIC", "-O1", "-g1", "-Wall", "-Wextra", "-fblocks", "-fexceptions"),
        *("-x", "objective-c++", "-fobjc-runtime=gcc", "-fconstant-string-class=NSConstantString"),
        f"-I{RUNTIME / 'include'}",
        *("-isystem", str(torch_include), "-isystem", str(torch_include / "torch/csrc/api/include")),
        # After clang's own directories: GCC's holds <objc/...>, and intrinsics that clang cannot read.
        *("-idirafter", f"{_library_directory('libobjc.so')}/include"),
    ]


def _link_flags() -> list[str]:
    import torch

    torch_lib = Path(torch.__file__).parent / "lib"
    # The executor's sm_* functions stay undefined: it is loaded before this library.
    return [
        *("-shared", f"-L{torch_lib}", f"-Wl,-rpath,{torch_lib}", "-ltorch_cpu", "-lc10"),
        *(f"-L{_library_directory('libobjc.so')}", "-lobjc", "-lBlocksRuntime", "-ldl"),
    ]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"softmetal: build failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


@contextmanager
def locked() -> Iterator[None]:
    """One process at a time builds into `OUTPUT`."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with (OUTPUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def side_by_side(make: Callable[[_T], _U], parts: Iterable[_T]) -> list[_U]:
    """The results of `make`, which waits for a compiler, for each part: as many at a time as there are cores."""
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
            _run([COMPILER, *compile_flags(), "-c", str(source), "-o", str(partial)])
            partial.rename(target)
        return target

    objects = side_by_side(compiled, sorted(RUNTIME.glob("*.mm")))
    library, stamp = OUTPUT / "libsoftmetal.so", OUTPUT / "libsoftmetal.stamp"
    wanted = _digest(_link_flags(), [path.name for path in objects])
    if not library.exists() or not stamp.exists() or stamp.read_text() != wanted:
        partial = library.with_suffix(".partial")
        _run([COMPILER, *map(str, objects), *_link_flags(), "-o", str(partial)])
        partial.rename(library)
        stamp.write_text(wanted)
    return library


def build_device() -> Path:
    """Builds what is stale of the device library, which leaves the executor's functions undefined.

    Raises:
        Unavailable: a tool or package is missing.
        RuntimeError: a compile failed; the message holds the compiler's.
    """
    require_tools()
    with locked():
        return _build_runtime()


def compile_host_source(source: Path, target: Path, extra_flags: list[str]) -> None:
    """Compiles one `.mm` of the project to an object, unless the object is newer than all that it was made of."""
    dependencies, command = target.with_suffix(".d"), target.with_suffix(".command")
    line = [COMPILER, *compile_flags(), *extra_flags, "-c", str(source), "-o", str(target)]
    if target.exists() and dependencies.exists() and command.exists() and command.read_text() == repr(line):
        made_of = dependencies.read_text().split(":", 1)[1].replace("\\\n", " ").split()
        newest = max((Path(p).stat().st_mtime for p in made_of if Path(p).exists()), default=0.0)
        if all(Path(p).exists() for p in made_of) and target.stat().st_mtime > newest:
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    _run([*line, "-MMD", "-MF", str(dependencies)])
    command.write_text(repr(line))


def build_test_extension(command: Any, extension: Any, sources: list[str]) -> None:
    """Links the test library of an extension that setuptools has just built: its objects, and the host's on top.

    The ordinary library stays as it is, for whoever imports the package without this device.

    Args:
        command: the running build_ext.
        extension: the extension, built.
        sources: what the ordinary Linux build leaves out: `.mm`, and the generated `.cpp` of kernel sources.
    """
    require_tools()
    flags = [f"-I{path}" for path in extension.include_dirs]
    flags += [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in extension.define_macros]
    flags += ["-fvisibility=hidden", "-Werror"]  # an unknown selector is only a warning

    def compiled(source: str) -> str:
        target = OUTPUT / "host" / f"{Path(source).name}.o"
        compile_host_source(Path(source).resolve(), target, flags)
        return str(target)

    objects = side_by_side(compiled, sources)
    ordinary = command.compiler.object_filenames(extension.sources, output_dir=command.build_temp)
    newest = max(Path(path).stat().st_mtime for path in [*objects, *ordinary])
    if not EXTENSION.exists() or EXTENSION.stat().st_mtime < newest:
        command.compiler.link_shared_object(
            [*ordinary, *objects],
            str(EXTENSION),
            libraries=command.get_libraries(extension),
            library_dirs=extension.library_dirs,
            extra_postargs=extension.extra_link_args,
            target_lang="c++",
        )
