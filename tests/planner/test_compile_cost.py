"""Tests that benchmarks/metal/compile_cost.py counts the kernel instances that the C++ compiler finds in kernel_list.h."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTED = """
#include <cstdio>
#include "kernels/shared/kernel_list.h"
int main() {
  for (const marlin::KernelInfo& kernel : marlin::kKernels)
    std::printf("%.*s %d\\n", int(kernel.library.size()), kernel.library.data(), int(kernel.naming));
}
"""
# The number of instances for each KernelNaming: one; one per element type; one per format and element
# type; one per format and element type of tensor units.
INSTANCES = {"0": 1, "1": 3, "2": 21, "3": 12}


def test_every_instantiation_is_counted(tmp_path: Path) -> None:
    program = tmp_path / "listed"
    (tmp_path / "listed.cpp").write_text(LISTED)
    subprocess.run(
        ["g++", "-std=c++20", "-I", ROOT, tmp_path / "listed.cpp", "-o", program], check=True
    )  # fmt: skip
    expected: Counter[str] = Counter()
    for line in subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines():
        library, naming = line.split()
        expected[library] += INSTANCES[naming]
    script = [sys.executable, str(ROOT / "benchmarks/metal/compile_cost.py"), "--json"]
    done = subprocess.run(script, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert {row["library"]: row["instantiations"] for row in found} == dict(expected)
    assert all(0 < row["preprocessed_bytes"] < row["source_bytes"] * 3 for row in found)
