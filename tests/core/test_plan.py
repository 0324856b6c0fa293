"""The launch planner and its model alone, without torch or Metal: compiles tests/core/*_test.cpp and runs them."""

import re
import subprocess
from pathlib import Path

import cxx
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "fewest"), [("plan_test", 100_000), ("plan_mlstm_test", 100_000), ("cost_test", 500_000)]
)
def test_plans(name: str, fewest: int, run_folder: Path) -> None:
    command = [cxx.compiler(), "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror"]
    sources = [ROOT / f"tests/core/{name}.cpp", *sorted((ROOT / "csrc").glob("plan*.cpp"))]
    sources += [ROOT / "csrc" / file for file in ("cost.cpp", "gpu_device.cpp", "tile_budget.cpp")]
    program = cxx.link(run_folder, cxx.objects(run_folder, sources, command).values(), command)
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    checks = re.search(r"^(\d+) checks, 0 failed$", done.stdout, re.MULTILINE)
    assert checks, done.stdout
    assert int(checks[1]) > fewest
