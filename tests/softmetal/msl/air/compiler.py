"""A kernel of a metallib -> shared object for the executor: llvm-dis, translate.py, llvm-link, clang, cached by content.

As a script (`python -m msl.air.compiler`, the metallib's path on stdin) it prints the library's path and the files that
it was made from, one a line; the executor's sm_compile runs it so.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..compiler import (
    Compiled,
    CompileError,
    cache_folder,
    library_files,
    link_library,
    optimised,
    to_llvm,
    toolchain_digest,
)
from .functions import UnknownFunction
from .metadata import MetadataError
from .metallib import KERNEL, Metallib, MetallibError, open_metallib
from .tables import names_only
from .translate import Translation
from .values import TranslateError

_HERE = Path(__file__).resolve().parent
_DISASSEMBLE, _LINK = "llvm-dis-19", "llvm-link-19"


def _run(command: list[str], data: bytes) -> str:
    try:
        done = subprocess.run(command, input=data, capture_output=True)
    except FileNotFoundError as error:
        raise CompileError(f"{command[0]} not found; install with: apt-get install llvm-19") from error
    if done.returncode:
        raise CompileError(f"{command[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def disassemble(bitcode: bytes) -> str:
    """LLVM's text form of a module.

    Raises:
        CompileError: it is not bitcode that LLVM 19 reads.
    """
    return _run([_DISASSEMBLE, "-o", "-"], bitcode)


def _files() -> list[Path]:
    return sorted([*library_files(), *_HERE.glob("*.py"), _HERE / "functions.h"])


def _key(*parts: object) -> Path:
    key = hashlib.sha256(toolchain_digest().encode())
    for path in sorted([*_HERE.glob("*.py"), _HERE / "functions.h"]):
        key.update(path.read_bytes())
    for part in parts:
        key.update(part if isinstance(part, bytes) else repr(part).encode() + b"\0")
    return cache_folder() / f"air-{key.hexdigest()[:32]}.so"


def _functions(cpp: str, checked: bool) -> str:
    """The C++ of a module as LLVM text; many modules have the same."""
    path = _key("functions", cpp, checked).with_suffix(".ll")
    if not path.exists():
        text = to_llvm(f'#include "{_HERE / "functions.h"}"\n{cpp}', checked)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    return str(path)


def _assemble(translation: Translation, checked: bool, path: Path) -> None:
    functions = _functions(translation.cpp, checked)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        module = Path(folder) / "kernel.ll"
        module.write_text(translation.llvm)
        linked = _run([_LINK, "-S", str(module), functions, "-o", "-"], b"")
    link_library(optimised(linked, checked) if checked else linked, checked, path)


def compile_metallib(
    path: Path, *, kernel: str | None, constants: Mapping[str, str] | None = None, checked: bool = False
) -> Compiled:
    """Compiles one kernel of a library, or with `kernel` "" (or None) makes a library that has names only.

    Args:
        path: of the metallib.
        kernel: its name in the library.
        constants: function constants by name, or by index as text; values as C text ("true", "-3", "0x1p+1").
        checked: instruments the code for checked mode.

    Raises:
        CompileError: what the library, the kernel or a value of `constants` lacks; the text names the kernel.
    """
    try:
        library = open_metallib(path)
        return Compiled(_compile(library, kernel, dict(constants or {}), checked), (str(path),))
    except (MetallibError, OSError) as error:
        raise CompileError(str(error)) from error


def _compile(library: Metallib, kernel: str | None, values: dict[str, str], checked: bool) -> Path:
    if not kernel:
        names = [f.name for f in library.functions.values() if f.kind == KERNEL]
        path = _key("names", names, checked)
        if not path.exists():
            link_library(names_only(names, checked), checked, path)
        return path
    if kernel not in library.functions:
        raise CompileError(f"kernel {kernel!r}: the library has {len(library.functions)} functions, none of that name")
    code = library.bitcode(kernel)
    path = _key(code, kernel, sorted(values.items()), checked)
    if not path.exists():
        try:
            _assemble(Translation(disassemble(code), kernel, values, checked), checked, path)
        except (TranslateError, MetadataError, UnknownFunction) as error:
            raise CompileError(f"kernel {kernel!r}: {error}") from error
    return path


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--constant", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--checked", action="store_true")
    parser.add_argument("--kernel")
    options = parser.parse_args()
    constants = dict(c.split("=", 1) for c in options.constant)
    try:
        built = compile_metallib(
            Path(sys.stdin.read()), kernel=options.kernel, constants=constants, checked=options.checked
        )
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(built.path, *built.dependencies, *_files(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
