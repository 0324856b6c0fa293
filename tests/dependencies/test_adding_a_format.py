"""A weight format of known kinds is added in four files, and every part of the package computes with it.

The toy format's codes are integers, as those of uint4b8, but its offset is 5. docs/inside/architecture.md, "Where things
go", names the same files.
"""

import filecmp
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import cxx
from torch_marlin_metal.formats import WEIGHT_FORMATS

ROOT = Path(__file__).resolve().parents[2]
TOY = "uint4b5"
HEADER = "kernels/shared/types.h"
TABLE = "torch_marlin_metal/formats_table.py"
PAGE = "docs/formats/formats.md"
REFERENCE = "tests/support/reference.py"
MOST_FILES = 4


def edit(root: Path, file: str, pattern: str, replacement: str) -> None:
    """Replaces the one match of a pattern in a file."""
    text, count = re.subn(pattern, replacement, (root / file).read_text(), flags=re.MULTILINE)
    assert count == 1, f"{file}: {pattern} occurs {count} times"
    (root / file).write_text(text)


def add_format(root: Path) -> None:
    """Adds the toy format to a copy of the repository, as a person would, and builds Python's table."""
    last = list(WEIGHT_FORMATS)[-1]
    row = f'X({TOY}, integer, 4, 5, floating, none, 0, "(q - 5) * s", __VA_ARGS__)'
    edit(root, HEADER, rf"^(  X\({last},.*__VA_ARGS__\))$", rf"\1 \\\n  {row}")
    edit(
        root,
        PAGE,
        rf"^(\| `{last}` .*)$",
        rf"\1\n| `{TOY}` | `(q - 5) * s` | floating | none | | 16, 32, 64, 128, 256, K |",
    )
    edit(root, REFERENCE, rf'^(FORMATS = .*"{last}")', rf'\1, "{TOY}"')
    edit(root, REFERENCE, r"^(OFFSETS = \{.*)\}$", rf'\1, "{TOY}": 5}}')
    written = "import pathlib; from build_support import embed_formats as e; e.write_format_table(pathlib.Path())"
    subprocess.run([sys.executable, "-c", written], cwd=root, check=True)


def tracked() -> list[str]:
    """Returns the files that a copy of the repository needs, as git lists them."""
    folders = ("build_support", "csrc", "kernels", "torch_marlin_metal", "tests", "docs")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders, "setup.py", "pyproject.toml", "conftest.py",
         "README.md", "LICENSE"], cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    return [name for name in listed if (ROOT / name).exists()]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in tracked():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    return subprocess.run([*command], cwd=copy, env=environment, check=False, capture_output=True, text=True)


def test_a_format_of_known_kinds_is_added_in_four_files(copy: Path) -> None:
    toy = str(ROOT / "tests/dependencies/toy_format.py")
    add_format(copy)
    touched = [name for name in tracked() if not filecmp.cmp(ROOT / name, copy / name, shallow=False)]
    assert sorted(touched) == sorted([HEADER, TABLE, PAGE, REFERENCE]) and len(touched) <= MOST_FILES
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
    for row in ("integer, 6, 5, floating, none", "e4m3, 4, 0, floating, none", "integer, 4, 0, two_level, none",
                "e2m1, 4, 5, floating, none"):  # fmt: skip
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
    (copy / "softmetal").mkdir()  # the copy's tests have no Metal device
    (copy / "softmetal/__init__.py").write_text(
        "class Unavailable(RuntimeError): ...\n\n\nraise Unavailable('a copy')\n"
    )
    done = run(copy, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", chosen)
    assert done.returncode == 0, done.stdout + done.stderr
