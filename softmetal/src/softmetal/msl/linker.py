"""Links compiled kernels to shared objects. Calls the linker directly, because the compiler's driver adds 20 ms."""

from __future__ import annotations

import functools
import os
import shlex
import tempfile
from pathlib import Path

from .tools import CLANG, CompileError, install, output_of, run

OPTIONS = ["-shared", "-nostdlib", "-fno-sanitize-link-runtime", "-lm", "-lc", "-lgcc"]
_OBJECT, _OUTPUT = os.devnull, "out.so"  # placeholders for the driver, which needs the path of an existing object file


@functools.cache
def command() -> tuple[str, ...]:
    """Returns the linker command that the compiler's driver would run, without the object file and the output."""
    _, _, messages = output_of([CLANG, "-###", *OPTIONS, "-x", "none", _OBJECT, "-o", _OUTPUT], "")
    words = shlex.split(messages.rstrip().split("\n")[-1])
    own = ["-o", _OUTPUT, _OBJECT]
    if not all(words.count(word) == 1 for word in own):
        raise CompileError(f"{CLANG} -### names no linker's command for {' '.join(OPTIONS)}:\n{messages}")
    return tuple(word for word in words if word not in own)


def link(path: Path, compiler: list[str], llvm: str) -> None:
    """Compiles LLVM text to a shared object at `path`. `compiler` is a command without "-c" and "-o"."""
    with tempfile.TemporaryDirectory(prefix="softmetal-") as folder:
        compiled = f"{folder}/kernel.o"
        run([*compiler, "-c", "-o", compiled], llvm)
        tool, *options = command()
        install(path, [tool, compiled, *options, "-o"], "")
