"""Compiles a kernel of a metallib to a shared object for the executor: llvm-dis, translate.py, llvm-link, clang.

Results are cached by content.
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from ... import device
from ...msl.compiler import cached, install_llvm, link_library, optimised
from ...msl.llvm.arithmetic import add_metal_arithmetic
from ...msl.tools import CompileError, cache_folder, run
from .functions import UnknownFunction
from .metadata import MetadataError
from .metallib import Metallib, MetallibError, open_metallib
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


def load(
    path: str | Path, kernel: str, *, constants: device.Constants | None = None, checked: bool = False
) -> device.Library:
    """Loads one kernel of a metallib, which contains the output of Apple's compiler.

    Args:
        path: path of the metallib.
        kernel: the kernel's name in the metallib.
        constants: function constants by name or index. Constants that the kernel does not have are ignored.
        checked: whether to compile for checked mode.

    Raises:
        CompileError: the library cannot be read, it has no kernel of this name, or the kernel needs a function that
            this device does not support.
    """
    try:
        return _load(Path(path), kernel, device.constant_texts(constants), checked)
    except (MetallibError, OSError) as error:
        raise CompileError(str(error)) from error


@lru_cache(maxsize=256)
def _load(path: Path, kernel: str, values: tuple[tuple[str, str], ...], checked: bool) -> device.Library:
    return device.Library(str(_compile(open_metallib(path), kernel, dict(values), checked)))


def _compile(library: Metallib, kernel: str, values: dict[str, str], checked: bool) -> Path:
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
