"""Makes shared objects of compiled kernels. The linker is called directly, because the compiler's driver adds 20 ms."""

from __future__ import annotations

import functools
import os
import shlex
import tempfile
from pathlib import Path

from .tools import CLANG, CompileError, install, output_of, run

OPTIONS = ["-shared", "-nostdlib", "-fno-sanitize-link-runtime", "-lm", "-lc", "-lgcc"]
_OBJECT, _OUTPUT = os.devnull, "out.so"  # placeholders for the driver, which wants an object file that exists


@functools.cache
def command() -> tuple[str, ...]:
    """Returns the linker's command as the compiler's driver would run it, without the object file and the output."""
    _, _, messages = output_of([CLANG, "-###", *OPTIONS, "-x", "none", _OBJECT, "-o", _OUTPUT], "")
    words = shlex.split(messages.rstrip().split("\n")[-1])
    own = ["-o", _OUTPUT, _OBJECT]
    if not all(words.count(word) == 1 for word in own):
        raise CompileError(f"{CLANG} -### names no linker's command for {' '.join(OPTIONS)}:\n{messages}")
    return tuple(word for word in words if word not in own)


def link(path: Path, compiler: list[str], llvm: str) -> None:
    """Compiles LLVM text with `compiler`, a command that lacks "-c" and "-o", to a shared object at `path`."""
    with tempfile.TemporaryDirectory(prefix="softmetal-") as folder:
        compiled = f"{folder}/kernel.o"
        run([*compiler, "-c", "-o", compiled], llvm)
        tool, *options = command()
        install(path, [tool, compiled, *options, "-o"], "")
