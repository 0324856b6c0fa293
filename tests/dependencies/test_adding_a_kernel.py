"""Adds a kernel for products in three files. test_adding_a_kernel_to_a_family.py compiles and runs the result.

The toy kernel is gemv with one row per threadgroup and undivided K. docs/inside/architecture.md, "Add a format, a
kernel or an operator", names the same files.
"""

import os
import re
from pathlib import Path

from tests.support.copied_tree import ROOT, edit

TOY = "toy"
LIST = "kernels/shared/kernel_list.h"
SHADER = f"kernels/gemm/{TOY}.metal"
PLAN = "csrc/planner/variants.cpp"

RULES = """constexpr std::array kToyTiles{GemmTile{GemmVariant::toy, Kernel::toy, {1, kGemvColumns, kGemvK}, 0}};
constinit const VariantRules toy_variant{
    .tiles = kToyTiles,
    .min_slice = UINT32_MAX,
    .most_simdgroups = 1,
    .sums_bytes = gemv_threadgroup_bytes,
    .has_rows_along_x = true,
    .simdgroup_columns = kGemvColumns,
};

"""

# The body of a C++ program that plans the toy kernel and prints the plan.
PROGRAM = """GemmProblem problem{.M = 3, .a_row_stride = 48, .variant = "toy"};
  problem.weight = {.K = 48, .N = 132, .group_size = 16};
  const Plan plan = plan_gemm(problem, {});
  const Dispatch& dispatch = plan.dispatches.front();
  std::cout << host_name(dispatch.instance) << " " << template_instance(dispatch.instance) << " " << dispatch.grid.x
            << "x" << dispatch.grid.y << " " << is_gemm_variant("toy:1x128x16", ElementType::float16)
            << computes_experts(GemmVariant::toy) << (seconds(plan) > 0) << "\\n";"""
PLANNED = f"{TOY}_uint4b8_float16 {TOY}<WeightFormat::uint4b8, half> 3x2 101"


def add_kernel(root: Path) -> list[str]:
    """Adds the toy kernel to a copy of the repository, as a developer would, and returns the changed files."""
    shader = (root / "kernels/gemm/gemv.metal").read_text()
    (root / SHADER).write_text(shader.replace(" gemv(", f" {TOY}(").replace("KERNELS_GEMV", "KERNELS_TOY"))
    row = f'#define MARLIN_KERNELS_TOY(X) X("gemm/{TOY}", {TOY}, format_element, kMaskProduct)\n\n'
    edit(root, LIST, r"^(#define MARLIN_KERNELS_GEMV\(X\))", rf"{row}\1")
    edit(root, LIST, r"^(  MARLIN_KERNELS_GEMV\(X\) +\\)$", r"  MARLIN_KERNELS_TOY(X) \\\n\1")
    edit(root, LIST, r"X\(two_pass\)", rf"X({TOY}) X(two_pass)")
    edit(root, PLAN, r"^(const VariantRules& rules_of)", rf"{RULES}\1")
    return sorted([LIST, SHADER, PLAN])


def test_the_map_names_the_files_of_a_kernel() -> None:
    page = (ROOT / "docs/inside/architecture.md").read_text()
    (row,) = re.findall(r"^\| a GPU kernel for products .*$", page, re.MULTILINE)
    named = set(re.findall(r"`([\w/]+(?:\.\w+|/))`", row)) - {"tests/dependencies/test_adding_a_kernel.py"}
    assert named == {LIST, os.path.dirname(SHADER) + "/", PLAN}
