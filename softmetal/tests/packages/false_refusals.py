"""Counts the correct sources that the device refuses: `python tests/packages/false_refusals.py [--folder PATH]`.

The sources are MLX's headers, PyTorch's headers for Metal and ggml's Metal file, from wheels. `--folder` adds the
`.metal` files of a checkout, for example of candle's `candle-metal-kernels/src/metal_src`. `--compile` also compiles
all kernels of these files. Apple's compiler accepts all of these sources, so each refusal is a fault of the device.

All files are examined without the device's headers for the tensors of Metal 4. Files that need these headers (MLX calls
them "nax") are counted separately.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from ggml_kernels import DEFINES, ggml_source

from softmetal.apple import wheels
from softmetal.msl import compiler
from softmetal.msl.dialect import check
from softmetal.msl.lint import lint
from softmetal.msl.tokens import SourceError, significant, tokenize
from softmetal.msl.tools import CompileError

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
_KERNEL = re.compile(r"\[\[\s*kernel\b|(?<![\w:])kernel\s+(?=\w+\s+\w+\s*\()")


@dataclass(frozen=True)
class Source:
    """A source that Apple's compiler accepts. If `whole` is true, all its kernels are also compiled."""

    project: str
    name: str
    text: str
    own: str  # the file's own text, in which kernels are counted
    include_paths: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()
    whole: bool = False
    version: int = compiler.DEFAULT_VERSION


# MLX builds a kernel from several headers. The headers listed here must come first, because other headers of MLX use
# them without an #include.
_MLX_BASE = ("utils.h", "atomic.h", "reduce_utils.h", "reduction/ops.h", "sort.h")
_MLX_STEEL = ("steel/gemm/gemm.h", "steel/conv/conv.h")


def mlx() -> Iterator[Source]:
    include = wheels.unpack("mlx-metal") / "mlx" / "include"
    kernels = include / "mlx" / "backend" / "metal" / "kernels"
    for path in sorted(kernels.rglob("*.h")):
        before = _MLX_BASE if "attn" in path.parts else _MLX_BASE + _MLX_STEEL
        files = [kernels / name for name in before if path != kernels / name or "#pragma once" in path.read_text()]
        lines = [f'#include "{file.relative_to(include)}"' for file in (*files, path)]
        yield Source("MLX", path.name, HEAD + "\n".join(lines), path.read_text(), (str(include),))


def pytorch() -> Iterator[Source]:
    include = Path(torch.__file__).parent / "include"
    for path in sorted((include / "c10" / "metal").glob("*.h")):
        text = HEAD + f"#include <{path.relative_to(include)}>"
        yield Source("PyTorch", path.name, text, path.read_text(), (str(include),))


def ggml() -> Iterator[Source]:
    text = ggml_source()
    yield Source("ggml", "ggml-metal.metal", text, text, (), DEFINES)


def _headers(path: Path) -> set[str]:
    return {str(file.parent) for file in path.rglob("*.h")}


def folder(path: Path, whole: bool) -> Iterator[Source]:
    for file in sorted(path.rglob("*.metal")):
        text = file.read_text()
        paths = (
            str(path),
            str(path.parent),
            *(str(p) for p in file.parents if p.is_relative_to(path)),
            *sorted(_headers(path)),
        )
        # Fences with a thread_scope and coherent memory exist since MSL 3.2.
        version = 320 if "thread_scope" in text else compiler.DEFAULT_VERSION
        yield Source(path.name, file.name, text, text, paths, whole=whole, version=version)


def refusal(source: Source) -> str:
    """Returns the device's error message for the source, or "" if the device accepts it."""
    try:
        text = compiler.preprocess(source.text, source.name, source.include_paths, source.defines, source.version)
        code = significant(tokenize(text))
        messages = [error.message for error in (*lint(code), *check.refused(code))]
        if messages := messages or check.findings(text, source.version):
            return messages[0]
        if source.whole:
            compiler.compile_source(
                source.text,
                file_name=source.name,
                include_paths=source.include_paths,
                defines=source.defines,
                version=source.version,
            )
    except (CompileError, SourceError) as error:
        return str(error)
    return ""


def count(sources: Iterator[Source]) -> str:
    """Returns a project's line of the table, and a line for each refusal."""
    files = kernels = without_framework = 0
    refusals = []
    for source in sources:
        project = source.project
        message = refusal(source)
        if message and ("MetalPerformancePrimitives.h' file not found" in message or "nax" in source.name):
            without_framework += 1
            continue
        files += 1
        kernels += len(_KERNEL.findall(source.own))
        if message:
            lines = message.splitlines()
            refusals.append(f"  {source.name}: {next((line for line in lines if 'error' in line), lines[0])}")
    return "\n".join([f"{project:24}{files:8}{kernels:10}{len(refusals):10}{without_framework:14}", *refusals])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, action="append", default=[], help="a checkout with .metal files")
    parser.add_argument("--compile", action="store_true", help="also compile all kernels of the folders")
    options = parser.parse_args()
    print(f"{'':24}{'files':>8}{'kernels':>10}{'refused':>10}{'Metal 4 only':>14}")
    for sources in (pytorch(), mlx(), ggml(), *(folder(path, options.compile) for path in options.folder)):
        print(count(sources), flush=True)
