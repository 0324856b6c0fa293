"""Runs the tools of the compiler and stores the results."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .resident import Resident

HERE = Path(__file__).resolve().parent
_PROJECT = HERE.parents[2]
_IS_CHECKOUT = (_PROJECT / "pyproject.toml").exists()
_USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "softmetal"
# : The folders for built and for downloaded files: below a checkout of this project, or in the user's cache.
OUTPUT = _PROJECT / "build" if _IS_CHECKOUT else _USER_CACHE
DOWNLOADS = _PROJECT / ".cache" if _IS_CHECKOUT else _USER_CACHE
_CACHES = ("ccache", "sccache")


def _behind_cache(name: str) -> str:
    """Returns `name`. If the first program of this name on PATH is a compiler cache, returns the next program.

    A compiler cache stores no results for text on standard input. It would load clang again for each kernel, and hide a
    change of clang from us.
    """
    found = [path for folder in os.get_exec_path() if (path := shutil.which(name, path=folder))]
    behind = [path for path in found if Path(path).resolve().name not in _CACHES]
    return behind[0] if behind and behind[0] != found[0] else name


CLANG = _behind_cache(os.environ.get("SOFTMETAL_CXX", "clang++-19"))


class CompileError(Exception):
    """Metal source does not compile. The message contains the compiler's messages."""


def cache_folder() -> Path:
    """Returns the folder of compiled kernels: SOFTMETAL_CACHE, or `cache` in `OUTPUT`."""
    return Path(os.environ.get("SOFTMETAL_CACHE", OUTPUT / "cache"))


def output_of(command: Sequence[str], data: str | bytes) -> tuple[int, str, str]:
    """Runs a tool on `data`. Returns the tool's status, output and messages."""
    data = data.encode() if isinstance(data, str) else data
    try:
        if command[0] == CLANG:
            status, output, messages = _compiler().run(command[1:], data)
        else:
            done = subprocess.run(command, input=data, capture_output=True)
            status, output, messages = done.returncode, done.stdout, done.stderr
    except FileNotFoundError as error:
        package = "llvm-19" if command[0].startswith("llvm-") else "clang-19"
        raise CompileError(f"{command[0]} not found; install with: apt-get install {package}") from error
    return status, output.decode(errors="replace"), messages.decode(errors="replace")


@functools.cache
def _compiler() -> Resident:
    """Returns the compiler's process. Processes that this process forks also use it."""
    source = HERE / "resident.cpp"
    command = (CLANG, "-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-x", "c++", "-")
    digest = hashlib.sha256(repr(command).encode() + source.read_bytes()).hexdigest()[:16]
    library = cache_folder() / f"resident-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            done = subprocess.run([*command, "-o", made], input=source.read_bytes(), capture_output=True)
            if done.returncode:
                raise CompileError(done.stderr.decode(errors="replace"))
            made.replace(library)
    return Resident(CLANG, library)


def run(command: Sequence[str], data: str | bytes) -> str:
    """Runs a tool on `data` and returns the output. Raises CompileError with the tool's messages if the tool fails."""
    status, output, messages = output_of(command, data)
    if status:
        raise CompileError(messages.strip() or f"{command[0]} ended with status {status}")
    return output


def store(path: Path, content: bytes) -> None:
    """Writes a file of the cache. Another process sees either the complete file or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def install(path: Path, make: list[str], text: str) -> None:
    """Runs a command whose last argument is a temporary path, and moves the finished file to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        run([*make, temporary], text)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
