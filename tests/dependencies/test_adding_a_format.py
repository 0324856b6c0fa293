"""Adds a weight format of known kinds in four files; every part of the package then computes with it.

The toy format has integer codes, like uint4b8, but with the offset 5. docs/inside/architecture.md, "Add a format, a
kernel or an operator", names the same files.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import cxx
from tests.support.copied_tree import copy_tree, edit, run, touched_files
from torch_marlin_metal.formats import WEIGHT_FORMATS

ROOT = Path(__file__).resolve().parents[2]
TOY = "uint4b5"
HEADER = "kernels/shared/types.h"
TABLE = "torch_marlin_metal/formats_table.py"
PAGE = "docs/formats/formats.md"
REFERENCE = "tests/support/reference.py"
MOST_FILES = 4


def add_format(root: Path) -> None:
    """Adds the toy format to a copy of the repository, as a developer would, and builds Python's table."""
    last = list(WEIGHT_FORMATS)[-1]
    row = f'X({TOY}, integer, 4, 5, floating, none, 0, "(q - 5) * s", __VA_ARGS__)'
    edit(root, HEADER, rf"^(  X\({last},.*__VA_ARGS__\))$", rf"\1 \\\n  {row}")
    edit(
        root,
        PAGE,
        rf"^(\| `{last}` .*)$",
        rf"\1\n| `{TOY}` | `(q - 5) * s` | floating | none | | 16, 32, 64, 128, 256, K |",
    )
    edit(root, REFERENCE, r"^(FORMATS = \(.*)\)$", rf'\1, "{TOY}")')
    edit(root, REFERENCE, r"^(OFFSETS = \{.*)\}$", rf'\1, "{TOY}": 5}}')
    written = "import pathlib; from build_support import embed_formats as e; e.write_format_table(pathlib.Path())"
    subprocess.run([sys.executable, "-c", written], cwd=root, check=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_tree(tmp_path)


def test_a_format_of_known_kinds_is_added_in_four_files(copy: Path) -> None:
    toy = str(ROOT / "tests/dependencies/toy_format.py")
    add_format(copy)
    touched = touched_files(copy)
    assert touched == sorted([HEADER, TABLE, PAGE, REFERENCE]) and len(touched) <= MOST_FILES
    done = run(copy, sys.executable, toy, TOY, cxx.compiler())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == f"{TOY}: quantized, decoded and multiplied"


def test_the_map_names_the_files_of_a_format() -> None:
    page = (ROOT / "docs/inside/architecture.md").read_text()
    (row,) = re.findall(r"^\| a weight format .*$", page, re.MULTILINE)
    named = set(re.findall(r"`([\w/]+\.\w+)`", row)) - {"tests/dependencies/test_adding_a_format.py"}
    assert named == {HEADER, TABLE, PAGE, REFERENCE}


def test_traits_without_kernels_do_not_compile(copy: Path) -> None:
    add_format(copy)
    header = (copy / HEADER).read_text()
    for row in ("integer, 7, 5, floating, none", "e4m3, 4, 0, floating, none", "e2m1, 4, 5, floating, none",
                "e2m1, 8, 0, floating, none",
                "table, 8, 0, floating, none"):  # fmt: skip
        (copy / HEADER).write_text(header.replace("integer, 4, 5, floating, none", row))
        done = run(copy, cxx.compiler(), "-std=c++20", "-fsyntax-only", "-x", "c++", "-I.", HEADER)
        assert done.returncode != 0 and f"{TOY} has traits without kernels" in done.stderr, row


def test_the_whole_package_computes_with_an_added_format(copy: Path, everything: bool) -> None:
    """Builds the copy's extension, and runs the tests of the operators on the CPU and of the page's table."""
    if not everything:
        pytest.skip("compiling the extension takes minutes; --everything runs it")
    add_format(copy)
    built = run(copy, sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
    assert built.returncode == 0, built.stdout + built.stderr
    tests = ("tests/ops/test_gemm.py", "tests/ops/test_embedding.py", "tests/docs/test_docs.py")
    chosen = f"({TOY} and cpu) or format_table"
    (copy / "softmetal").mkdir()  # the copy's tests then find no Metal device
    (copy / "softmetal/__init__.py").write_text(
        "class Unavailable(RuntimeError): ...\n\n\ndef install():\n    raise Unavailable('a copy')\n"
    )
    done = run(copy, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", chosen)
    assert done.returncode == 0, done.stdout + done.stderr
