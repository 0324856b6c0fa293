"""Compiles C++ for tests, each file once per test run.

The workers of pytest-xdist share the work and the object files.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert found, "no C++ compiler: install g++"
    return found


def objects(folder: Path, sources: Iterable[Path], command: Sequence[str]) -> dict[Path, Path]:
    """Compiles sources into a folder of this test run. Returns the object file of each source."""
    targets = {source: folder / f"{source.stem}-{_digest([*command, str(source)])}.o" for source in sources}
    for wait in (False, True):  # first compiles what no other worker compiles, then waits for the other workers' files
        for source, target in targets.items():
            _once(target, [*command, "-c", str(source)], wait=wait)
    return targets


def of_extension(sources: Iterable[Path]) -> dict[Path, Path] | None:
    """Returns the object files that setup.py compiled for the extension.

    Returns None unless all of them exist and the extension was linked after the last change of `csrc/` and `kernels/`.
    The time of an object says nothing, because ninja does not compile again what has not changed.
    """
    found = {source: EXTENSION / source.relative_to(ROOT).with_suffix(".o") for source in sources}
    linked = ROOT / "torch_marlin_metal" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not found or not all(path.exists() for path in (linked, *found.values())):
        return None
    newest = max(path.stat().st_mtime for room in ("csrc", "kernels") for path in (ROOT / room).rglob("*"))
    return found if linked.stat().st_mtime > newest else None


def link(folder: Path, parts: Iterable[Path], command: Sequence[str]) -> Path:
    """Links objects to a program in a folder of this test run and returns the program's path."""
    whole = [*command, *map(str, parts)]
    target = folder / f"program-{_digest(whole)}"
    _once(target, whole, wait=True)
    return target


def _digest(command: Sequence[str]) -> str:
    return hashlib.sha256(repr(command).encode()).hexdigest()[:16]


def _once(target: Path, command: Sequence[str], *, wait: bool) -> None:
    """Runs a command with `-o target`, unless another worker has built the target.

    If another worker is running the command, this function waits for it if `wait` is true; otherwise it returns at
    once. If the command fails, every worker that needs the target fails with the command's message.
    """
    failure = target.with_name(f"{target.name}.failed")
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if not target.exists() and not failure.exists():
            # The name is unique, because a killed worker's compiler may still be writing.
            partial = target.with_name(f"{target.name}.{os.getpid()}")
            done = subprocess.run([*command, "-o", str(partial)], check=False, capture_output=True, text=True)
            if done.returncode == 0:
                partial.rename(target)
            else:
                failure.write_text(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        assert not failure.exists(), failure.read_text()
