"""Includes between the folders of csrc/ and kernels/ point in one direction, as the table below allows."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".h", ".cpp", ".mm", ".metal"}
INCLUDE = re.compile(r'^\s*#\s*(?:include|import)\s+["<]([^">]+)[">]', re.MULTILINE)

# For each folder, the folders or files that it may include besides itself. For a file, the longest matching name
# applies.
ALLOWED = {
    "kernels/shared": [],
    "kernels/gemm": ["kernels/shared"],
    "kernels/weights": ["kernels/shared", "kernels/gemm/function_constants.h", "kernels/gemm/weight.h"],
    "kernels/experts": ["kernels/shared", "kernels/gemm", "kernels/decoder/gated.h"],
    "kernels/decoder": ["kernels/shared", "kernels/gemm/function_constants.h"],
    "kernels/mlstm": ["kernels/shared", "kernels/gemm"],
    # All families of operators share these folders. No file in them includes an operator.
    "csrc/core": ["kernels/shared"],
    "csrc/cpu": ["csrc/core"],
    "csrc/planner": [
        *("csrc/core/gemm_variants.h", "csrc/core/math.h", "kernels/shared"),
    ],
    "csrc/mps": ["csrc/planner"],
    # The families of operators: each may include the families above it.
    "csrc/weights": ["csrc/core", "csrc/cpu", "csrc/planner", "csrc/mps/encoder.h"],
    "csrc/gemm": ["csrc/core", "csrc/cpu", "csrc/planner", "csrc/mps", "csrc/weights"],
    "csrc/decoder": [
        *("csrc/core", "csrc/cpu", "csrc/planner/plan.h", "csrc/planner/rates.h", "csrc/mps/encoder.h"),
        "kernels/decoder",
    ],
    "csrc/experts": ["csrc/core", "csrc/cpu", "csrc/planner", "csrc/weights", "csrc/gemm", "csrc/decoder"],
    # No other folder may include the mLSTM.
    "csrc/mlstm": [
        *("csrc/core", "csrc/planner/plan.h", "csrc/planner/launch_cache.h", "csrc/mps/encoder.h"),
        *("csrc/planner/commit_policy.h", "csrc/planner/rates.h", "csrc/cpu"),
    ],
    "csrc/python": [
        *("csrc/cpu/capability.h", "csrc/cpu/huge_pages.h", "csrc/planner"),
        *("csrc/gemm/plan_cache.h", "csrc/experts/gpu_plan.h"),
    ],
}
EXCEPTIONS = {
    # kernel_list.h lists the kernels of all folders of kernels/, so it includes their parameters.
    ("kernels/shared/kernel_list.h", "kernels/gemm/geometry.h"),
    ("kernels/shared/kernel_list.h", "kernels/experts/params.h"),
    ("kernels/shared/kernel_list.h", "kernels/decoder/params.h"),
    ("kernels/shared/kernel_list.h", "kernels/mlstm/params.h"),
}
TORCH_IN_CORE = ("tensor_checks", "tensor_views", "weight_arguments", "saved_weight", "autocast")
# Libraries that only some folders may include.
LIBRARIES = {
    "torch": (
        re.compile(r"(ATen|c10|torch)/"),
        {
            *(f"csrc/core/{name}" for name in TORCH_IN_CORE),
            *("csrc/cpu/parallel", "csrc/mps", "csrc/python"),
            *("csrc/weights", "csrc/gemm", "csrc/decoder", "csrc/experts", "csrc/mlstm"),
        },
    ),
    "PyTorch's private MPS headers": (re.compile(r"ATen/(native/)?mps/"), {"csrc/mps/pytorch_internals"}),
    "Metal": (re.compile(r"Metal/"), {"csrc/mps"}),
}


def fits(path: str, name: str) -> bool:
    return path == name or path.startswith((name + "/", name + "."))


def room_of(path: str) -> str:
    found = [room for room in ALLOWED if fits(path, room)]
    assert found, f"{path} lies in no room of the table"
    return max(found, key=len)


def includes(root: Path) -> Iterator[tuple[str, str]]:
    """Yields pairs of a file and a file that it includes, both relative to the repository."""
    for folder in ("csrc", "kernels"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                name = path.relative_to(root).as_posix()
                yield from ((name, target) for target in INCLUDE.findall(path.read_text()))


def wrong_arrows(root: Path) -> list[str]:
    wrong = []
    for path, target in includes(root):
        room = room_of(path)
        if target.startswith(("csrc/", "kernels/")):
            allowed = any(fits(target, name) for name in (room, *ALLOWED[room])) or (path, target) in EXCEPTIONS
        else:
            rooms = [rooms for pattern, rooms in LIBRARIES.values() if pattern.match(target)]
            allowed = all(any(fits(path, name) for name in names) for names in rooms)
        if not allowed:
            wrong.append(f"{path} includes {target}")
    return wrong


def test_includes_follow_the_table() -> None:
    assert wrong_arrows(ROOT) == []


def test_every_entry_of_the_table_is_needed() -> None:
    found = list(includes(ROOT))
    for room, names in ALLOWED.items():
        for name in names:
            assert any(room_of(path) == room and fits(target, name) for path, target in found), f"{room} <- {name}"
    assert set(found) >= EXCEPTIONS


def test_a_wrong_include_is_found(tmp_path: Path) -> None:
    planted = {
        "csrc/planner/estimate.cpp": '#include "csrc/mps/encoder.h"',
        "csrc/planner/plan.h": "#include <ATen/core/Tensor.h>",
        "csrc/weights/argument_rules.h": '  #  include "csrc/gemm/operators.h"',
        "csrc/cpu/scratch.h": "#include <ATen/core/Tensor.h>",
        "csrc/gemm/cpu/gemm.h": '#include "csrc/mlstm/problem.h"',
        "csrc/mlstm/gpu_plan.h": '#include "csrc/planner/estimate.h"',
        "csrc/gemm/ops_mps.mm": "#import <ATen/mps/MPSStream.h>",
        "kernels/gemm/fused.metal": '#include "csrc/core/math.h"',
    }
    for name, line in planted.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// A file.\n{line}\n#include <vector>\n")
    assert [arrow.split(" ")[0] for arrow in wrong_arrows(tmp_path)] == sorted(planted)
