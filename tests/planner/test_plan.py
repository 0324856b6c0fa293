"""Compiles tests/planner/*_test.cpp with the launch planner, without torch, and runs them."""

import subprocess
from pathlib import Path

import pytest

from tests.support import cxx

ROOT = Path(__file__).resolve().parents[2]


PROGRAMS = (
    "plan_rules_test",
    "plan_choices_test",
    "plan_cache_test",
    "plan_mlstm_test",
    "chips_test",
    "estimate_test",
    "tensor_test",
    "experts_test",
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_plans(name: str, run_folder: Path) -> None:
    command = [cxx.compiler(), "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}"]
    plans = [*sorted((ROOT / "csrc").glob("*/gpu_plan.cpp")), *(ROOT / "csrc/gemm").glob("p*.cpp")]
    sources = [*sorted((ROOT / "csrc/planner").rglob("*.cpp")), *plans]
    planner = cxx.of_extension(sources) or cxx.objects(run_folder, sources, command)
    test = cxx.objects(run_folder, [ROOT / f"tests/planner/{name}.cpp"], command)
    program = cxx.link(run_folder, [*test.values(), *planner.values()], command)
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
