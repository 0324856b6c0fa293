"""Tests the shortened source text of the kernels that the build puts into the extension.

A compiler must read the same tokens from the text as from the files, and each line must keep its number.
"""

import subprocess
from pathlib import Path

import pytest

from build_support.embed_kernels import kernel_text
from tests.support import cxx

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted((ROOT / "kernels").rglob("*.metal"))
METAL_HEADERS = ["metal_stdlib", "metal_tensor", "MetalPerformancePrimitives/MetalPerformancePrimitives.h"]
HEADER = """#pragma once
#ifdef __METAL_VERSION__
#include <metal_stdlib>  // both
#else
#include "kernels/host.h"
#endif
#ifndef __METAL_VERSION__
int for_the_host;
#else
int for_metal;
#endif
#ifdef OTHER
#define UNUSED_TOO(a) UNUSED(a)
#endif
#define UNUSED(a) \\
  a + a
#define PASTED_one(X) X
#define PASTE(kind) PASTED_##kind
"""
SHADER = """// a comment
#include "kernels/header.h"
  constant char text[] = "// not a comment";  // but this
PASTE(one)
int line_5 = __LINE__;
"""


def tokens(text: str, folder: Path, options: tuple[str, ...]) -> str:
    """Returns the tokens that a compiler reads, separated by single spaces."""
    for header in METAL_HEADERS:
        (folder / header).parent.mkdir(exist_ok=True)
        (folder / header).touch()
    command = [cxx.compiler(), "-E", "-P", "-nostdinc", "-x", "c++", "-std=c++17", "-D__METAL_VERSION__=310"]
    command += [f"-I{folder}", f"-I{ROOT}", *options, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_a_compiler_reads_the_same_words(path: Path, tmp_path: Path) -> None:
    short = kernel_text(path, ROOT)
    for options in ((), ("-DMARLIN_ONLY=some_kernel<half>", '-DMARLIN_ONLY_NAME="some"')):
        assert tokens(short, tmp_path, options) == tokens(path.read_text(), tmp_path, options)
    assert "//" not in short
    for room in ("experts", "mlstm"):
        assert path.parent.name == room or f"kernels/{room}/params.h" not in short


def test_what_is_left_out(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "header.h").write_text(HEADER)
    (kernels / "shader.metal").write_text(SHADER)
    text = kernel_text(kernels / "shader.metal", tmp_path)
    for gone in ("a comment\n", "but this", "for_the_host", "host.h", "UNUSED", "__METAL_VERSION__"):
        assert gone not in text, gone
    for kept in (
        "#include <metal_stdlib>\n",
        'text[] = "// not a comment";\n',
        "int for_metal;",
        "PASTED_one",
        "#ifdef OTHER",
    ):
        assert kept in text, kept
    command = [cxx.compiler(), "-E", "-P", "-nostdinc", "-x", "c++", f"-I{tmp_path}", "-"]
    (tmp_path / "metal_stdlib").touch()
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert "int line_5 = 5;" in done.stdout


def test_conditions_on_metals_version_are_kept_and_elif_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shader.metal"
    versions = ("#if __METAL_VERSION__ >= 320", "int a;", "#elif __METAL_VERSION__ >= 310", "int b;", "#else", "int c;")
    path.write_text("\n".join((*versions, "#endif", "#ifdef X", "int d;", "#elif defined(Y)", "int e;", "#endif\n")))
    text = kernel_text(path, tmp_path)
    for options in ((), ("-U__METAL_VERSION__", "-D__METAL_VERSION__=320"), ("-U__METAL_VERSION__", "-DY")):
        assert tokens(text, tmp_path, options) == tokens(path.read_text(), tmp_path, options) != ""
    path.write_text("#ifdef __METAL_VERSION__\nint a;\n#elif OTHER\nint b;\n#endif\n")
    with pytest.raises(ValueError, match="__METAL_VERSION__: expected no #elif, got '#elif OTHER'"):
        kernel_text(path, tmp_path)
