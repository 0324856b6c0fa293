"""Checks Metal source with clang's "C++ for OpenCL": address spaces, overloads, and types of the library.

The check produces messages and no code. include/metal.h declares Metal's library in that dialect.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from ..tokens import SourceError, Token, tokenize
from ..tools import CLANG, CompileError, cache_folder, install, output_of
from .messages import read_messages
from .rewrite import to_opencl
from .signatures import check_signatures

_HERE = Path(__file__).resolve().parent
_INCLUDE = _HERE / "include"
_SHARED = [_HERE.parent / "include" / "softmetal" / name for name in ("constants.h", "internal_names.h", "traits.h")]
# Features of OpenCL that are disabled because Metal lacks them. Without the first feature, a variable at program scope
# must be constant, as in Metal. The generic address space is enabled, because without it clang finds no constructor
# that copies a struct.
_LEFT_OUT = ("__opencl_c_program_scope_global_variables", "__opencl_c_device_enqueue", "__opencl_c_fp64", "cl_khr_fp64")
_FLAGS = (
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-ferror-limit=0", "-fno-caret-diagnostics"),
    # The dialect is C++17 and Metal is C++14, so C++17 is an error. messages.py drops the error if clang also accepts
    # the construct in C++14.
    "-Werror=pre-c++17-compat",
    *("-fno-color-diagnostics", "-ftemplate-backtrace-limit=0", "-ffreestanding", "-flax-vector-conversions=none"),
    *("-Xclang", "-cl-ext=" + ",".join("-" + name for name in _LEFT_OUT)),
)


def files() -> list[Path]:
    """Returns the files on which the check depends."""
    return sorted([*_HERE.glob("*.py"), *_INCLUDE.glob("*.h"), *_SHARED])


@functools.cache
def digest() -> str:
    """Returns a digest of the check's files and flags."""
    result = hashlib.sha256(repr(_FLAGS).encode())
    for path in files():
        result.update(path.name.encode() + path.read_bytes())
    return result.hexdigest()[:16]


@functools.cache
def _declarations(version: int) -> Path:
    """Precompiles the declarations of Metal's library for one language version."""
    # The precompiled file contains the paths of its sources, so each checkout needs its own.
    key = hashlib.sha256(f"{_HERE} {digest()} {CLANG}".encode()).hexdigest()[:16]
    path = cache_folder() / f"dialect-{version}-{key}.pch"
    if not path.exists():
        source = f'#include "{_INCLUDE / "metal.h"}"\n'
        flags = [f"-DSM_METAL_VERSION={version}", "-c", "-Xclang", "-emit-pch", "-o"]
        install(path, [CLANG, *_FLAGS, "-", *flags], source)
    return path


def refused(code: list[Token]) -> list[SourceError]:
    """Finds errors that need no compile: wrong types or slots of kernel arguments."""
    return sorted(check_signatures(code), key=lambda error: error.line)


def findings(text: str, version: int) -> list[str]:
    """Compiles preprocessed Metal source with clang and returns the error messages.

    Args:
        text: the source with line markers.
        version: the language version as in `__METAL_VERSION__`, 310 for MSL 3.1.

    Returns:
        `file:line: error: message` for each error of clang that Metal's compiler also reports.

    Raises:
        SourceError: brackets do not match.
        CompileError: clang failed for a reason other than the source.
    """
    command = [CLANG, *_FLAGS, f"-DSM_METAL_VERSION={version}", "-include-pch", str(_declarations(version))]
    # The name of the precompiled file contains a digest of its sources, so clang need not compare their times.
    command += ["-Xclang", "-fno-validate-pch"]
    status, _, output = output_of([*command, "-fsyntax-only", "-"], to_opencl(tokenize(text)))
    found = read_messages(output)
    if status and not found.all:
        raise CompileError(f"the check of address spaces failed: {output.strip()[:2000]}")
    return found.errors
