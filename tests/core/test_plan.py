"""The launch planner alone, without torch or Metal: compiles tests/core/plan_test.cpp and runs it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_plans(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler: install g++"
    program = tmp_path / "plan_test"
    sources = [ROOT / "tests/core/plan_test.cpp", *sorted((ROOT / "csrc").glob("plan*.cpp"))]
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    checks = re.search(r"^(\d+) checks, 0 failed$", done.stdout, re.MULTILINE)
    assert checks, done.stdout
    assert int(checks[1]) > 100_000
