"""Builds the executor, libsoftmetal_executor.so."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from ..msl.tools import OUTPUT

_HERE = Path(__file__).resolve().parent
_COMPILER = os.environ.get("SOFTMETAL_CXX", "clang++-19")
_FLAGS = [
    *("-std=c++20", "-O2", "-g1", "-fPIC", "-march=native", "-ffp-contract=off", "-Wall", "-Wextra"),
    "-Wl,-Bsymbolic-functions",
    *(f"-I{_HERE}", f'-DSOFTMETAL_HOME="{_HERE.parent}"', f'-DSOFTMETAL_OUTPUT="{OUTPUT}"'),
]


def build_executor(folder: Path) -> Path:
    """Compiles the executor into `folder`, unless the library there is up to date. Returns the library's path.

    Raises:
        RuntimeError: the executor does not compile. The compiler's messages follow.
    """
    sources = sorted(_HERE.rglob("*.cpp"))
    digest = hashlib.sha256(repr([_COMPILER, _FLAGS, str(_HERE)]).encode())
    for path in [*sources, *sorted(_HERE.rglob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    library = folder / "libsoftmetal_executor.so"
    stamp = folder / "libsoftmetal_executor.sha256"
    if library.exists() and stamp.exists() and stamp.read_text() == digest.hexdigest():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / library.name
        command = [_COMPILER, *_FLAGS, "-shared", f"-Wl,-soname,{library.name}", *map(str, sources), "-o", str(built)]
        done = subprocess.run([*command, "-lpthread", "-ldl"], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the executor does not build:\n{done.stderr}")
        os.replace(built, library)
        stamp.write_text(digest.hexdigest())
    return library
