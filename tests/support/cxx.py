"""Compiles C++ for tests, each file once per run: the workers of pytest-xdist share the object files and the work."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path


def compiler() -> str:
    """Returns the C++ compiler of this machine."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert found, "no C++ compiler: install g++"
    return found


def objects(folder: Path, sources: Iterable[Path], command: Sequence[str]) -> dict[Path, Path]:
    """Compiles sources into a folder of this test run. Returns the object file of each source."""
    targets = {source: folder / f"{source.stem}-{_digest([*command, str(source)])}.o" for source in sources}
    for wait in (False, True):  # first compile the files that no other worker is compiling, then wait for the others
        for source, target in targets.items():
            _once(target, [*command, "-c", str(source)], wait=wait)
    return targets


def link(folder: Path, parts: Iterable[Path], command: Sequence[str]) -> Path:
    """Links objects to a program in a folder of this test run and returns the program's path."""
    whole = [*command, *map(str, parts)]
    target = folder / f"program-{_digest(whole)}"
    _once(target, whole, wait=True)
    return target


def _digest(command: Sequence[str]) -> str:
    return hashlib.sha256(repr(command).encode()).hexdigest()[:16]


def _once(target: Path, command: Sequence[str], *, wait: bool) -> None:
    """Runs a command with `-o target` unless another worker has. If one is running it, waits for it or returns.

    If the command fails, every worker that needs the target fails with its message.
    """
    failure = target.with_name(f"{target.name}.failed")
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if not target.exists() and not failure.exists():
            # A unique name, because the compiler of a killed worker may still be writing the same target.
            partial = target.with_name(f"{target.name}.{os.getpid()}")
            done = subprocess.run([*command, "-o", str(partial)], check=False, capture_output=True, text=True)
            if done.returncode == 0:
                partial.rename(target)
            else:
                failure.write_text(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        assert not failure.exists(), failure.read_text()
