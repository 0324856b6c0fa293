"""Outside of the tables, code asks for properties of formats and kernels, and does not compare their names."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from torch_marlin_metal.extension import native
from torch_marlin_metal.formats import ALIASES, WEIGHT_FORMATS

ROOT = Path(__file__).resolve().parents[2]
KERNEL_LIST = ROOT / "kernels/shared/kernel_list.h"
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Names:
    """The names in the rows of a table.

    Attributes:
        enumeration: the names' type in C++. C++ files outside of `tables` must not write its enumerators at all.
        names: the names as text. Code may pass and store them, but not compare them.
        tables: files of csrc/ and kernels/ that have a row for each name.
        is_chosen: whether C++ may write an enumerator, as a plan does that names its kernel, but not compare with it.
            Python is then not checked, because there a word such as "dequantize" is also an option.
    """

    enumeration: str
    names: frozenset[str]
    tables: tuple[str, ...]
    is_chosen: bool = False


KINDS = {
    "weight formats": Names(
        enumeration="WeightFormat",
        names=frozenset((*WEIGHT_FORMATS, *ALIASES)),
        tables=("kernels/shared/types.h",),
    ),
    "kernel variants": Names(
        enumeration="GemmVariant",
        names=frozenset(native.gemm_variants()),
        # kernels/shared/kernel_list.h lists these names
        tables=("csrc/planner/decision_rows.h", "csrc/planner/variants.cpp"),
    ),
    "kernels": Names(
        enumeration="Kernel",
        names=frozenset(re.findall(r'\bX\("[\w/]+",\s*(\w+),', KERNEL_LIST.read_text())),
        tables=("kernels/shared/kernel_list.h", "csrc/planner/decision_rows.h"),
        is_chosen=True,
    ),
}


def in_cpp(text: str, kind: Names) -> Iterator[int]:
    """Yields the lines that write an enumerator, or that compare a value with a name."""
    names = "|".join(sorted(kind.names, key=len, reverse=True))
    literal = rf'"(?:{names})"'
    enumerator = rf"\b{kind.enumeration}::(?:{names})\b"
    if kind.is_chosen:
        enumerator = rf"[=!]=\s*(?:\w+::)*{enumerator}|{enumerator}\s*[=!]=|\bcase\s+(?:\w+::)*{enumerator}"
    found = rf"{enumerator}|[=!]=\s*{literal}|{literal}\s*[=!]=|\bstarts_with\({literal}"
    code = COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text)
    for match in re.finditer(found, code):
        yield code.count("\n", 0, match.start()) + 1


def constants(node: ast.AST) -> Iterator[str]:
    """Yields the strings of an operand: of a literal, or of the items of a tuple, list or set."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for item in node.elts:
            yield from constants(item)


def in_python(text: str, kind: Names) -> Iterator[int]:
    """Yields the lines that compare with a name: ==, !=, in, not in, startswith, endswith, and `case` of a match."""
    for node in ast.walk(ast.parse(text)):
        operands: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            operands = list(node.args) if node.func.attr in ("startswith", "endswith") else []
        if any(name in kind.names for operand in operands for name in constants(operand)):
            yield node.lineno if not isinstance(node, ast.MatchValue) else node.value.lineno


def comparisons(root: Path, kind: Names) -> dict[str, list[int]]:
    """Returns, for each file of the product, the lines that depend on a name."""
    found = {}
    for room, readers in (
        ("csrc", {".h": in_cpp, ".cpp": in_cpp, ".mm": in_cpp}),
        ("kernels", {".h": in_cpp, ".metal": in_cpp}),
        ("torch_marlin_metal", {".py": in_python}),
    ):
        for path in sorted((root / room).rglob("*")):
            name = path.relative_to(root).as_posix()
            reader = readers.get(path.suffix)
            if reader is in_python and kind.is_chosen:
                continue
            if reader is not None and name not in kind.tables and (lines := sorted(reader(path.read_text(), kind))):
                found[name] = lines
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_compared_only_in_tables(kind: str) -> None:
    names = KINDS[kind]
    found = comparisons(ROOT, names)
    traits = "kernels/shared/types.h, kernels/shared/kernel_list.h, csrc/planner/variants.h"
    assert not found, f"ask for a trait of the {kind} instead ({traits}): files and lines {found}"
    assert names.names and all((ROOT / table).exists() for table in names.tables)


PLANTED_FORMATS = {
    "csrc/planner/a.cpp": "// WeightFormat::lut4\nbool f(WeightFormat x) { return x == WeightFormat::lut4; }\n",
    "csrc/mps/b.mm": 'bool f() {\n  return name(format) == "nvfp4";\n}\n',
    "kernels/gemm/c.h": "template <>\nstruct Operand<WeightFormat::uint4_bias> {};\n",
    "kernels/gemm/d.metal": "  switch (format) {\n    case WeightFormat::uint4:\n",
    "torch_marlin_metal/e.py": '"""lut4 == lut4"""\nlut = name == "nf4"\n',
    "torch_marlin_metal/f.py": 'x = {"lut4": 1}\ncoded = weight.weight_format in ("nvfp4", "mxfp4")\n',
    "torch_marlin_metal/g.py": 'match name:\n    case "uint4" | "uint4b8":\n        pass\n',
    "torch_marlin_metal/h.py": 'make(weight_format="uint4b8")\nif name.startswith("uint4"):\n    pass\n',
}

PLANTED_VARIANTS = {
    "csrc/planner/a.cpp": "// GemmVariant::gemv\nbool f(GemmVariant x) { return x == GemmVariant::fused; }\n",
    "csrc/gemm/b.cpp": 'bool f() {\n  return name(variant) != "two_pass";\n}\n',
    "torch_marlin_metal/c.py": 'x = plan(variant="gemv")\nsmall = chosen.variant in ("gemv", "fused")\n',
}


PLANTED_KERNELS = {
    "csrc/planner/a.cpp": "const Plan plan{.kernel = Kernel::gemv};\nbool f(Kernel x) { return x != Kernel::gemv; }\n",
    "csrc/mps/b.mm": "  switch (kernel) {\n    case marlin::Kernel::moe_gemv:\n",
    "csrc/gemm/c.h": "// Kernel::gemv == x\nbool f() { return Kernel::moe_sort == kernel; }\n",
    "csrc/mps/d.mm": 'std::string name = "moe_sort";\nbool sorts = info(kernel).name == "moe_sort";\n',
}


@pytest.mark.parametrize(
    ("kind", "planted"),
    [("weight formats", PLANTED_FORMATS), ("kernel variants", PLANTED_VARIANTS), ("kernels", PLANTED_KERNELS)],
)
def test_a_planted_comparison_is_found(kind: str, planted: dict[str, str], tmp_path: Path) -> None:
    for file, text in planted.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = comparisons(tmp_path, KINDS[kind])
    assert {file: set(lines) for file, lines in found.items()} == {file: {2} for file in planted}
