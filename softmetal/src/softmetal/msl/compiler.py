"""Compiles Metal Shading Language text to a shared object for the executor: clang -E, translate.py, clang.

Results are cached by content. `python -m msl.compiler` reads source from standard input. It prints the path of the
library and of each file from which the library was made, one per line. The executor's sm_compile calls the same `main`
through server.py.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import expansions, linker
from .dialect import check
from .fast_math import ALL, FLUSHING, FUNCTIONS, MODES, PLAIN, PRECISE, SAFE, Math, flush_half, replace_pragmas, varied
from .lint import lint
from .llvm import specialise
from .llvm.alignment import add_alignment_checks
from .llvm.arithmetic import add_metal_arithmetic
from .llvm.required_constants import missing_values
from .llvm.specialise import FrontEnd
from .llvm.uninitialised import add_value_checks, mark_integers
from .tokens import SourceError, message, significant, tokenize
from .tools import CLANG, HERE, CompileError, cache_folder, install, run
from .translate import Translator

_INCLUDE = HERE / "include"
DEFAULT_FILE_NAME = "program_source.metal"
DEFAULT_VERSION = 310  # MSL 3.1, in the form of __METAL_VERSION__

# Metal source gets the macros of its language version, and none of the host's.
_PREPROCESS = [
    *("-x", "c++", "-std=c++17", "-E", "-nostdinc", "-ffreestanding", "-w"),
    *(f"-U{m}" for m in ("__linux__", "__linux", "linux", "__gnu_linux__", "__unix__", "__unix", "unix", "__x86_64__")),
    *("-D__METAL__=1", "-D__METAL_MACOS__=1"),
]
# With AVX512-FP16, LLVM 19 converts a half NaN to the short -32768. Metal's result is 0, and so is LLVM's without this
# instruction set.
_MACHINE = ("-march=native", "-mno-avx512fp16")
# Lanes that take part in the same barrier or simdgroup function must wait for each other. The executor matches the
# lanes by the call site, so no pass may merge, copy or reorder the calls.
_CODE = [
    *(*_MACHINE, "-fPIC", "-fno-optimize-sibling-calls", "-mllvm", "-enable-tail-merge=false"),
    *("-mllvm", "-disable-branch-fold", "-mllvm", "-disable-tail-duplicate"),
    *("-mllvm", "-disable-early-taildup", "-mllvm", "-disable-block-placement"),
]
_COMPILE = [
    *(*_CODE, "-std=gnu++17", "-fdeclspec", "-fconvergent-functions"),
    # DWARF 4, because addr2line misses inlined frames in DWARF 5.
    *("-gdwarf-4", "-gline-tables-only", "-fdebug-compilation-dir=."),
    *("-w", "-ferror-limit=20", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-stack-protector"),
    *("-fno-math-errno", "-fno-strict-aliasing", "-fno-finite-loops", "-fstack-clash-protection"),
    "-fno-strict-float-cast-overflow",  # float to integer saturates, NaN becomes 0
    # These options make clang behave like Metal's compiler, which contracts a*b+c inside one expression, and rounds
    # half and bfloat after each operation.
    *("-ffp-contract=on", "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
]
FAST = ["-O2"]
# Vectorization is off, because accesses of more than 16 bytes would not be instrumented.
_CHECKED = [
    *("-fno-vectorize", "-fno-slp-vectorize"),
    *("-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
]
_NOT_YET = (
    "memory-accesses",
    "memintrinsics",
    "atomics",
)  # These accesses are instrumented later, after llvm/alignment.py has read the text.
_BEFORE_CHECKS = [
    "-O2",
    # For products, this pass takes a third of the optimizer's time, and removes almost no loads.
    *("-mllvm", "-enable-load-pre=false"),
    *(*_CHECKED, *(f for x in _NOT_YET for f in ("-mllvm", f"-tsan-instrument-{x}=0"))),
    # The first three checks call functions of the executor. local-bounds executes a trap instead of a call.
    *("-fsanitize=integer-divide-by-zero,shift-exponent,array-bounds,local-bounds", "-fsanitize-recover=all"),
    "-fstrict-flex-arrays=1",
    "-ftrivial-auto-var-init=pattern",
]
_AFTER_CHECKS = [
    "-O0",  # The library's text is already optimized. More passes would cost a test more time than they save.
    *(*_CHECKED, "-mllvm", "-tsan-instrument-read-before-write=1"),
    *("-mllvm", "-tsan-instrument-atomics=0"),  # sm_note_atomic reports atomics
]


@dataclass(frozen=True)
class Compiled:
    """A shared object and the user's files from which it was made."""

    path: Path
    dependencies: tuple[str, ...]


def library_files() -> list[Path]:
    """Returns the files of this folder, and of the executor, that a compiled library depends on."""
    headers = [p for p in _INCLUDE.rglob("*") if p.is_file()]
    return sorted(
        [*headers, *HERE.glob("*.py"), *HERE.glob("llvm/*.py"), HERE / "thunk.h", HERE.parent / "executor" / "abi.h"]
    )


def own_files() -> list[Path]:
    """Returns the files, other than the source and its includes, on which the result of `main` depends."""
    return [*library_files(), *check.files()]


def _predefined_macros() -> bytes:
    """Returns macros that identify the compiler's version and target instruction sets.

    The macros are cached in a file, because each compile of a kernel is a separate process and asks for them again. The
    file's name depends on the compiler's file and on the processor.
    """
    compiler = Path(shutil.which(CLANG) or CLANG).resolve()
    file = compiler.stat() if compiler.exists() else None
    processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    unchanging = [line for line in processor.splitlines() if "MHz" not in line and "bogomips" not in line]
    key = repr((str(compiler), file and (file.st_size, file.st_mtime_ns), unchanging))
    path = cache_folder() / f"macros-{hashlib.sha256(key.encode()).hexdigest()[:16]}.h"
    if not path.exists():
        install(path, [CLANG, *_MACHINE, "-E", "-dM", "-x", "c", "-", "-o"], "")
    return path.read_bytes()


@functools.cache
def toolchain_digest() -> str:
    digest = hashlib.sha256(_predefined_macros())
    digest.update(
        repr(
            [[math.flags for math in ALL], _PREPROCESS, _COMPILE, FAST, _BEFORE_CHECKS, _AFTER_CHECKS, linker.OPTIONS]
        ).encode()
    )
    for path in library_files():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def cached(name: str, suffix: str, *parts: object) -> Path:
    """Returns the cache path of a result that depends on `parts` and on this toolchain."""
    key = hashlib.sha256(toolchain_digest().encode())
    for part in parts:
        key.update((part if isinstance(part, bytes) else repr(part).encode()) + b"\0")
    return cache_folder() / f"{name}{key.hexdigest()[:32]}{suffix}"


@functools.cache
def _stubs() -> Path:
    """Makes a folder with an empty file for each of our headers, so that preprocessed Metal source does not contain
    their text.
    """
    names = sorted(str(p.relative_to(_INCLUDE)) for p in _INCLUDE.rglob("*") if p.is_file() and p.suffix != ".md")
    folder = cache_folder() / ("stubs-" + hashlib.sha256("\n".join(names).encode()).hexdigest()[:16])
    for name in names:
        stub = folder / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.touch()
    return folder


def precompiled(checked: bool, math: Math = PLAIN) -> Path:
    # A precompiled header contains the paths of its sources, so each checkout needs its own.
    digest = hashlib.sha256(f"{HERE} {toolchain_digest()}".encode()).hexdigest()
    path = cache_folder() / f"prelude-{'checked' if checked else 'fast'}-{'-'.join(math)}-{digest[:16]}.pch"
    if not path.exists():
        flags = [*_COMPILE, *math.flags, *(_BEFORE_CHECKS if checked else FAST), "-I", str(_INCLUDE)]
        # If a library function with a fault is inlined, the fault is reported at the line of the user's call.
        library = _inlined("#include <metal_stdlib>\n#pragma clang attribute pop\n")
        prelude = f'{library}#include "{HERE / "thunk.h"}"\n'
        install(path, [CLANG, "-x", "c++-header", "-", *flags, "-Xclang", "-emit-pch", "-o"], prelude)
    return path


def from_cpp(checked: bool, math: Math = PLAIN) -> list[str]:
    prelude = ["-include-pch", str(precompiled(checked, math)), "-Xclang", "-fno-validate-pch"]
    return [CLANG, "-x", "c++", "-", *prelude, *_COMPILE, *math.flags, *(_BEFORE_CHECKS if checked else FAST)]


def _inlined(cpp: str) -> str:
    return f"#pragma clang attribute push(__attribute__((always_inline)), apply_to = function)\n{cpp}"


def _to_llvm(cpp: str, checked: bool, math: Math) -> str:
    """Compiles C++ with our headers to LLVM text before any pass. Adds Metal's integer arithmetic to the text."""
    command = [*from_cpp(checked, math), "-Xclang", "-disable-llvm-passes", "-S", "-emit-llvm", "-o", "-"]
    text = add_metal_arithmetic(run(command, _inlined(cpp)))
    text = flush_half(text) if math.mode in FLUSHING else text
    return mark_integers(text) if checked else text


def _optimise(checked: bool) -> list[str]:
    flags = [*_CODE, *(_BEFORE_CHECKS if checked else FAST), "-w", "-ffp-contract=on"]
    return [CLANG, "-x", "ir", "-", *flags, "-S", "-emit-llvm", "-o"]


def install_llvm(path: Path, cpp: str, checked: bool) -> None:
    """Compiles C++ that uses our headers to a file of optimized LLVM text.

    Every function is inlined into its callers.
    """
    install(path, _optimise(checked), _to_llvm(cpp, checked, PLAIN))


def optimised(llvm: str, checked: bool) -> str:
    """Runs the compiler's passes on LLVM text. In checked mode, link_library later adds the checker's calls."""
    return run([*_optimise(checked), "-"], llvm)


def link_library(llvm: str, checked: bool, path: Path) -> None:
    """Compiles optimized LLVM text to a shared object at `path`. In checked mode, adds the calls of the checker."""
    flags = [*_CODE, *_AFTER_CHECKS] if checked else [*_CODE, *FAST]
    text = add_value_checks(add_alignment_checks(llvm)) if checked else llvm
    linker.link(path, [CLANG, "-x", "ir", "-", *flags, "-w"], text)


def _front_end(translation: Translator, checked: bool, math: Math) -> FrontEnd:
    """Compiles translated text to LLVM text, in which integer function constants have no values yet."""
    llvm = _to_llvm(translation.text, checked, math)
    if translation.wanted is not None:
        unset = [c.name for c in translation.constants if not c.is_defined]
        if missing := missing_values(llvm, unset):
            names = ", ".join(f"'{c.name}' ({c.index})" for c in translation.constants if c.name in missing)
            raise CompileError(f"kernel '{translation.wanted}': function constants without a value: {names}")
    return specialise.of(llvm, translation.constants)


def preprocess(
    source: str, file_name: str, include_paths: Sequence[str], defines: Sequence[str], version: int = DEFAULT_VERSION
) -> str:
    """Expands the user's macros and includes. Our own headers are replaced by empty files.

    Raises:
        CompileError: a header is missing, a macro is malformed, or the source contains an #error.
    """
    macros = [f"__METAL_VERSION__={version}", *(["__HAVE_BFLOAT__=1"] if version >= 310 else []), *defines]
    flags = [*(f"-D{d}" for d in macros), *(f for p in include_paths for f in ("-I", p))]
    text = f'#line 1 "{file_name}"\n{source}\n'
    expanded = run([CLANG, *_PREPROCESS, "-isystem", str(_stubs()), *flags, "-"], text)
    # clang -E does not expand a macro in a pragma, and the compile of the expanded text does not define the macro. A
    # count that contains a macro is therefore removed. Without a count, clang unrolls the loop completely.
    return re.sub(r"^([ \t]*#pragma unroll)[ \t]*\([^\n]*[A-Za-z_][^\n]*\)", r"\1", expanded, flags=re.MULTILINE)


def _dependencies(text: str, file_name: str) -> tuple[str, ...]:
    """Returns the user's files in preprocessed text, without the source itself."""
    files = dict.fromkeys(re.findall(r'^# \d+ "((?:\\.|[^"<])*)"', text, re.MULTILINE))
    own = str(cache_folder())
    return tuple(f for f in files if f != file_name and not f.startswith(own) and Path(f).is_file())


def _expanded(
    source: str, file_name: str, include_paths: Sequence[str], defines: Sequence[str], version: int
) -> tuple[str, tuple[str, ...]]:
    """Returns preprocessed text and the list of the user's files in it.

    The text is cached, unless the source asks whether a file exists.
    """
    names = (tuple(include_paths), tuple(defines), version, os.getcwd(), str(_stubs()))
    path = cached("", ".expanded", source, file_name, *names)
    text = expansions.load(path)
    if text is not None:
        return text, _dependencies(text, file_name)
    text = preprocess(source, file_name, include_paths, defines, version)
    files = _dependencies(text, file_name)
    if "__has_include" not in source and not any("__has_include" in Path(f).read_text(errors="replace") for f in files):
        expansions.save(path, text, files)
    return text, files


def _check_types(text: str, version: int, accepted: Path) -> None:
    """Raises CompileError if the check of address spaces, overloads and types finds an error.

    The check remembers text that passes.
    """
    if errors := check.findings(text, version):
        raise CompileError("\n".join(errors))
    accepted.parent.mkdir(parents=True, exist_ok=True)
    accepted.touch()


def compile_source(
    source: str,
    *,
    file_name: str = DEFAULT_FILE_NAME,
    constants: Mapping[str, str] | None = None,
    include_paths: Sequence[str] = (),
    defines: Sequence[str] = (),
    checked: bool = False,
    kernel: str | None = None,
    math: Math = PLAIN,
    version: int = DEFAULT_VERSION,
) -> Compiled:
    """Compiles Metal source.

    Args:
        source: Metal Shading Language text.
        file_name: the source's name in messages and reports.
        constants: function constants by name, or by index as text. Values are C text ("true", "-3", "0x1p+1", "{1,2}").
        include_paths: folders for the source's own includes.
        defines: macros, "NAME" or "NAME=VALUE".
        checked: instruments the code for checked mode.
        kernel: the only kernel to compile, or "" for none. If the source has no function constants, all kernels are
            compiled and this argument is ignored.
        math: the math mode, which can be a varied mode (fast_math.py), and whether functions such as `exp` are precise
            or fast. Metal's default is fast for both.
        version: the language version as in `__METAL_VERSION__`: 310 is MSL 3.1.

    Raises:
        CompileError: the source does not compile, or `kernel` uses a function constant without a value, even in a
            branch that is never taken. Messages have the source's line numbers.
    """
    text, files = _expanded(source, file_name, include_paths, defines, version)
    values = dict(constants or {})
    if "function_constant" not in text:
        kernel = None
    path = cached("", ".so", sorted(values.items()), checked, kernel, tuple(math), text)
    accepted = cached("", ".accepted", check.digest(), version, text)
    shared = cached("", ".front", sorted(values), checked, kernel, tuple(math), text)
    front_end = specialise.load(shared) if not path.exists() and accepted.exists() and shared.exists() else None
    translation: Translator | None = None
    if not accepted.exists() or not (path.exists() or front_end):
        try:
            tokens = tokenize(replace_pragmas(text))
            refused = []
            if not accepted.exists():
                refused += [*lint(significant(tokens)), *check.refused(significant(tokens))]
            translation = None if refused or path.exists() else Translator(tokens, values, kernel)
        except SourceError as error:
            refused = [error]
        if refused:
            raise CompileError("\n".join(message(text, error, DEFAULT_FILE_NAME) for error in refused))
    if translation:
        front_end = _front_end(translation, checked, math)
        if values and all(c.is_late for c in translation.constants if c.is_defined):
            specialise.save(shared, front_end)
    if front_end:
        llvm = front_end.with_values(values)
        link_library(optimised(llvm, checked) if checked else llvm, checked, path)
    if not accepted.exists():
        _check_types(text, version, accepted)
    return Compiled(path, files)


def answer(
    parser: argparse.ArgumentParser, compiled: Callable[[argparse.Namespace], Compiled], files: Sequence[Path]
) -> int:
    """Runs a compiler for the executor's sm_compile.

    Prints the path of the library and of each file that it was made from.

    Args:
        parser: a parser with the compiler's own options. This function adds the options for constants, mode and kernel.
        compiled: a function that compiles with the parsed options.
        files: the files of the compiler itself.
    """
    parser.add_argument("--constant", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--checked", action="store_true")
    parser.add_argument("--kernel")
    options = parser.parse_args()
    options.constants = dict(c.split("=", 1) for c in options.constant)
    try:
        built = compiled(options)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(built.path, *built.dependencies, *files, sep="\n")
    return 0


def _compiled(options: argparse.Namespace) -> Compiled:
    mode = options.math if options.vary is None or options.math != SAFE else varied(options.vary)
    return compile_source(
        sys.stdin.read(),
        file_name=options.file_name,
        constants=options.constants,
        include_paths=options.include,
        defines=options.define,
        checked=options.checked,
        kernel=options.kernel,
        math=Math(mode, options.functions),
        version=options.language_version,
    )


def main() -> int:
    """Compiles the source on standard input with the options of the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file-name", default=DEFAULT_FILE_NAME)
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--define", action="append", default=[])
    parser.add_argument("--math", choices=MODES, default=SAFE)
    parser.add_argument("--functions", choices=FUNCTIONS, default=PRECISE)
    parser.add_argument("--vary", type=int, metavar="SEED", help="instead of safe mode, the varied mode of this seed")
    parser.add_argument("--language-version", type=int, default=DEFAULT_VERSION, metavar="310")
    return answer(parser, _compiled, own_files())


if __name__ == "__main__":
    sys.exit(main())
