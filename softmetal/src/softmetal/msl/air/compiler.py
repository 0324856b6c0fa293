"""Compiles a kernel of a metallib to a shared object for the executor: llvm-dis, translate.py, llvm-link, clang.

Results are cached by content. The executor's sm_compile calls `main` through server.py. `python -m msl.air.compiler` does
the same: the metallib's path on standard input; it prints the library's path and the files that it was made from, one
per line.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..compiler import (
    Compiled,
    answer,
    cached,
    install_llvm,
    library_files,
    link_library,
    optimised,
)
from ..llvm.arithmetic import add_metal_arithmetic
from ..tools import CompileError, cache_folder, run
from .functions import UnknownFunction
from .metadata import MetadataError
from .metallib import KERNEL, Metallib, MetallibError, open_metallib
from .tables import names_only
from .translate import Translation
from .values import TranslateError

_HERE = Path(__file__).resolve().parent
_DISASSEMBLE, _LINK = "llvm-dis-19", "llvm-link-19"


def disassemble(bitcode: bytes) -> str:
    """Returns LLVM's text form of a module.

    Raises:
        CompileError: LLVM 19 cannot read the bitcode.
    """
    return run([_DISASSEMBLE, "-o", "-"], bitcode)


def _files() -> list[Path]:
    return sorted([*_HERE.glob("*.py"), *_HERE.glob("*.h")])


def _cached(suffix: str, *parts: object) -> Path:
    return cached("air-", suffix, *(path.read_bytes() for path in _files()), *parts)


def _functions(cpp: str, checked: bool) -> str:
    """Compiles the C++ of a module to LLVM text. The result is cached, because many modules have the same C++."""
    path = _cached(".ll", cpp, checked)
    if not path.exists():
        install_llvm(path, f'#include "{_HERE / "functions.h"}"\n{cpp}', checked)
    return str(path)


def _assemble(translation: Translation, checked: bool, path: Path) -> None:
    functions = _functions(translation.cpp, checked)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        module = Path(folder) / "kernel.ll"
        module.write_text(add_metal_arithmetic(translation.llvm))
        linked = run([_LINK, "-S", str(module), functions, "-o", "-"], "")
    link_library(optimised(linked, checked) if checked else linked, checked, path)


def compile_metallib(
    path: Path, *, kernel: str | None, constants: Mapping[str, str] | None = None, checked: bool = False
) -> Compiled:
    """Compiles one kernel of a library. If `kernel` is "" or None, the result names all kernels and has no code.

    Args:
        path: path of the metallib.
        kernel: the kernel's name in the library.
        constants: function constants by name, or by index as text. Values are C text ("true", "-3", "0x1p+1").
        checked: instruments the code for checked mode.

    Raises:
        CompileError: the library cannot be read, it has no kernel of this name, or the kernel cannot be translated.
    """
    try:
        library = open_metallib(path)
        return Compiled(_compile(library, kernel, dict(constants or {}), checked), (str(path),))
    except (MetallibError, OSError) as error:
        raise CompileError(str(error)) from error


def _compile(library: Metallib, kernel: str | None, values: dict[str, str], checked: bool) -> Path:
    if not kernel:
        names = [f.name for f in library.functions.values() if f.kind == KERNEL]
        path = _cached(".so", "names", names, checked)
        if not path.exists():
            link_library(names_only(names, checked), checked, path)
        return path
    if kernel not in library.functions:
        raise CompileError(f"kernel {kernel!r}: the library has {len(library.functions)} functions, none of that name")
    code = library.bitcode(kernel)
    path = _cached(".so", code, kernel, sorted(values.items()), checked)
    if not path.exists():
        try:
            _assemble(Translation(disassemble(code), kernel, values, checked), checked, path)
        except (TranslateError, MetadataError, UnknownFunction) as error:
            raise CompileError(f"kernel {kernel!r}: {error}") from error
    return path


def _compiled(options: argparse.Namespace) -> Compiled:
    path = Path(sys.stdin.read())
    return compile_metallib(path, kernel=options.kernel, constants=options.constants, checked=options.checked)


def main() -> int:
    """Compiles the metallib that standard input names, with the options of the command line. Returns the exit status."""
    return answer(argparse.ArgumentParser(description=__doc__), _compiled, [*library_files(), *_files()])


if __name__ == "__main__":
    sys.exit(main())
