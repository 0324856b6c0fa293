"""Runs the tools of the compiler and keeps the results."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
_PROJECT = HERE.parents[2]
_IS_CHECKOUT = (_PROJECT / "pyproject.toml").exists()
_USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "softmetal"
#: The folders of what the device builds and of what it downloads: below a checkout of this project, or in the user's cache.
OUTPUT = _PROJECT / "build" if _IS_CHECKOUT else _USER_CACHE
DOWNLOADS = _PROJECT / ".cache" if _IS_CHECKOUT else _USER_CACHE
CLANG = os.environ.get("SOFTMETAL_CXX", "clang++-19")


class CompileError(Exception):
    """Raised for Metal source that does not compile. The text is the compiler's messages."""


def cache_folder() -> Path:
    """Returns the folder of compiled kernels: SOFTMETAL_CACHE, or `cache` in `OUTPUT`."""
    return Path(os.environ.get("SOFTMETAL_CACHE", OUTPUT / "cache"))


def output_of(command: Sequence[str], data: str | bytes) -> tuple[int, str, str]:
    """Runs a tool on `data`. Returns the tool's status, output and messages."""
    try:
        done = subprocess.run(command, input=data.encode() if isinstance(data, str) else data, capture_output=True)
    except FileNotFoundError as error:
        package = "llvm-19" if command[0].startswith("llvm-") else "clang-19"
        raise CompileError(f"{command[0]} not found; install with: apt-get install {package}") from error
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def run(command: Sequence[str], data: str | bytes) -> str:
    """Runs a tool on `data` and returns the output. Raises CompileError with the tool's messages if the tool fails."""
    status, output, messages = output_of(command, data)
    if status:
        raise CompileError(messages.strip() or f"{command[0]} ended with status {status}")
    return output


def store(path: Path, content: bytes) -> None:
    """Writes a file of the cache. Another process sees either the complete file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def install(path: Path, make: list[str], text: str) -> None:
    """Runs a command on a temporary path, which is its last argument, and moves the finished file to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        run([*make, temporary], text)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
