"""Adds a kernel for products, experts, the decoder or the mLSTM in three files; the family's plan then launches it.

The toy kernels are copies of kernels of their families under another name. The plan launches each for one size, in
place of the original.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dependencies import test_adding_a_kernel as products
from tests.dependencies.test_adding_a_kernel import LIST
from tests.support import cxx
from tests.support.copied_tree import ROOT, copy_tree, edit, run, touched_files

MOST_FILES = 4
# Compiles kernels of the tree in the working directory for the software Metal device, and looks up each by its host
# name.
COMPILED = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tests.support.kernels import launch
assert Path(launch.__file__).is_relative_to(Path.cwd()), launch.__file__
for kernel, weight_format in zip(sys.argv[2::2], sys.argv[3::2]):
    launch._specialise(kernel, weight_format, "float16", (), True, ())
    print(kernel, "compiled")
"""


@dataclass(frozen=True)
class Family:
    """A family of kernels, and one of its kernels, which the toy kernel copies.

    Attributes:
        shader: the copied file, below `kernels/`, without its suffix.
        kernel: the copied kernel.
        rows: the name of the macro in the list of kernels.
        plan: the file that chooses the kernel.
        chosen: the text of `plan` that chooses the original.
        toy: the replacement of this text, which chooses `{toy}` for one size.
        weight_format: the format of the kernel's weight, if it has a weight.
        program: the body of a C++ program that plans that size, with `plan` as the result.
    """

    shader: str
    kernel: str
    rows: str
    plan: str
    chosen: str
    toy: str
    weight_format: str
    program: str


FAMILIES = {
    "decoder": Family(
        shader="decoder/norm",
        kernel="rms_norm",
        rows="NORM",
        plan="csrc/decoder/gpu_plan.cpp",
        chosen=r"\.kernel = Kernel::rms_norm",
        toy=".kernel = problem.columns == 7 ? Kernel::{toy} : Kernel::rms_norm",
        weight_format="",
        program="const Plan plan = plan_norm({.x_stride = 7, .rows = 3, .columns = 7}, {});",
    ),
    "mlstm": Family(
        shader="mlstm/step",
        kernel="mlstm_step",
        rows="MLSTM_STEP",
        plan="csrc/mlstm/gpu_plan.cpp",
        chosen=r"planner\.add\(Kernel::mlstm_step",
        toy="planner.add(params.DV == 7 ? Kernel::{toy} : Kernel::mlstm_step",
        weight_format="",
        program="""MlstmLaunch launch;
  launch.sizes = {1, 1, 1, 8, 7, 64};
  const Plan plan = plan_mlstm_step(launch, {}).plan;""",
    ),
    "experts": Family(
        shader="experts/moe_gemv",
        kernel="moe_gemv",
        rows="MOE_GEMV",
        plan="csrc/experts/gpu_plan.cpp",
        chosen=r"^  if \(sorts_pairs\(tiling\)\) \{$",
        toy="  if (problem.top_k == 7) products.instance.kernel = Kernel::{toy};\n  if (sorts_pairs(tiling)) {{",
        weight_format="uint4b8",
        program="""MoeProblem problem{.experts = 8, .top_k = 7};
  problem.product = {.M = 7, .a_row_stride = 64, .variant = "gemv"};
  problem.product.weight = {.K = 64, .N = 128, .group_size = 32};
  const Plan plan = plan_moe(problem, {});""",
    ),
}
PROGRAM = """#include <iostream>
#include "csrc/planner/variants.h"
#include "csrc/decoder/gpu_plan.h"
#include "csrc/experts/gpu_plan.h"
#include "csrc/mlstm/gpu_plan.h"
using namespace marlin;
void print(const Plan& plan) {
  for (const Dispatch& dispatch : plan.dispatches)
    std::cout << host_name(dispatch.instance) << "\\n";
}
int main() {
  %s
}
"""


def add_kernel(root: Path, family: Family, toy: str) -> list[str]:
    """Adds a toy kernel to a copy of the repository, as a developer would, and returns the changed files."""
    shader = f"kernels/{Path(family.shader).parent}/{toy}.metal"
    text = (root / f"kernels/{family.shader}.metal").read_text()
    renamed = text.replace(f" {family.kernel}(", f" {toy}(").replace(f"KERNELS_{family.rows}(", f"KERNELS_{toy}(")
    (root / shader).write_text(renamed)
    rows = rf"^(#define MARLIN_KERNELS_{family.rows}\(X\)(?:.*\\\n)*.*\n)"
    listed = (root / LIST).read_text()
    (row,) = re.findall(rows, listed, re.MULTILINE)
    own = row.replace(f"KERNELS_{family.rows}(", f"KERNELS_{toy}(").replace(f'"{family.shader}", {family.kernel},',
                      f'"{Path(family.shader).parent}/{toy}", {toy},')  # fmt: skip
    (root / LIST).write_text(listed.replace(row, f"{own}\n{row}"))
    edit(root, LIST, rf"^(  MARLIN_KERNELS_{family.rows}\(X\) *\\?)$", rf"  MARLIN_KERNELS_{toy}(X) \\\n\1")
    edit(root, family.plan, family.chosen, family.toy.format(toy=toy))
    return sorted([shader, LIST, family.plan])


@pytest.mark.whole
def test_a_kernel_of_each_family_is_added_in_three_files(tmp_path: Path) -> None:
    copy = copy_tree(tmp_path)
    toys = {f"{family.kernel}_toy": family for family in FAMILIES.values()}
    touched = set(products.add_kernel(copy))
    assert touched_files(copy) == sorted(touched) and len(touched) == 3
    for toy, family in toys.items():
        added = add_kernel(copy, family, toy)
        touched |= set(added)
        assert touched_files(copy) == sorted(touched) and len(added) <= MOST_FILES
    main = copy / "main.cpp"
    bodies = [products.PROGRAM, *(f"{family.program}\n  print(plan);" for family in toys.values())]
    main.write_text(PROGRAM % "\n  ".join(f"{{\n  {body}\n  }}" for body in bodies))
    sources = [*sorted((copy / "csrc/planner").rglob("*.cpp")), *sorted((copy / "csrc").glob("*/gpu_plan.cpp")), main]
    command = [cxx.compiler(), "-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{copy}"]
    program = cxx.link(copy, cxx.objects(copy, sources, command).values(), command)
    planned = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    names = [
        "_".join([toy, *([family.weight_format] if family.weight_format else []), "float16"])
        for toy, family in toys.items()
    ]
    assert planned.splitlines() == [products.PLANNED, *names]
    kernels = [part for toy, family in toys.items() for part in (toy, family.weight_format)]
    done = run(copy, sys.executable, "-c", COMPILED, str(ROOT), *kernels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{toy} compiled" for toy in toys]
    done = run(copy, sys.executable, str(ROOT / "tests/dependencies/toy_kernel.py"), products.TOY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == f"{products.TOY}: multiplied"


def test_the_map_names_the_files_of_a_kernel_of_a_family() -> None:
    page = (ROOT / "docs/inside/architecture.md").read_text()
    (row,) = re.findall(r"^\| a GPU kernel of another family .*$", page, re.MULTILINE)
    for family in FAMILIES.values():
        assert family.plan in row or f"`{Path(family.plan).parent}/`" in row
    assert f"`{LIST}`" in row
