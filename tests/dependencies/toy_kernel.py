"""Runs a kernel that the tree in the working directory has and this package does not.

    python tests/dependencies/toy_kernel.py NAME

The kernels and the tests' reference come from the tree in the working directory, and only the software Metal device
comes from this repository. The kernel must be launched like gemv with one row per threadgroup.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [os.getcwd(), str(ROOT)]

import torch  # noqa: E402

from tests.support.kernels import launch  # noqa: E402
from tests.support.kernels.problems import Problem, check, run_product  # noqa: E402


def main() -> None:
    (name,) = sys.argv[1:]
    assert Path(launch.__file__).is_relative_to(Path.cwd()), f"{launch.__file__} is not the copy's"
    problem = Problem("uint4b8", 3, 132, 48, 16, torch.float16)
    constants = {"rows_per_threadgroup": 1, "subnormal_codes": True, "ragged_k": False, "ragged_n": True}
    options = {
        "group": (32, 1, 1),
        "groups": (problem.M, 2, 1),
        "threadgroup_bytes": launch.facts()["gemv_bytes"][problem.weight_format][1][1],
    }
    result, _ = run_product(name, problem, problem.K, constants, options, None)
    check(problem, result, raw_codes=True)
    print(f"{name}: multiplied")


if __name__ == "__main__":
    main()
