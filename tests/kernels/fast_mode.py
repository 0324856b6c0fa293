"""Shows which products stay within their error bound with Metal's default options: fast math and fast functions.

`PYTHONPATH=. python tests/kernels/fast_mode.py` prints the largest error for each weight format and kernel, in
multiples of the bound of docs/use/operators.md. The package compiles its kernels in safe mode.
"""

import functools
import sys

import torch

from softmetal import device
from tests.support.kernels import launch
from tests.support.kernels.cases import FORMATS, problem
from tests.support.kernels.fused import run_fused
from tests.support.kernels.problems import check, run_gemv
from tests.support.kernels.tiles import STAGED, run_tiles


def main() -> None:
    launch.compile = functools.partial(device.compile, math="fast", functions="fast")
    runs = {
        "gemv": functools.partial(run_gemv, rows=4, simdgroups=4),
        "gemv without subnormal codes": functools.partial(run_gemv, rows=4, simdgroups=4, subnormal_codes=False),
        "fused": functools.partial(run_fused, rows=16, simdgroups=3),
        "fused without subnormal codes": functools.partial(run_fused, rows=16, simdgroups=3, subnormal_codes=False),
        STAGED[0]: functools.partial(run_tiles, STAGED[0]),
    }
    for weight_format in sys.argv[1:] or FORMATS:
        p = problem(5, 64, 136, weight_format=weight_format, dtype=torch.float16, group_size=64)
        for kernel, run in runs.items():
            try:
                found = f"{check(p, run(p, checked=False), raw_codes=kernel.startswith('gemv')):.2g}"
            except AssertionError as error:
                found = str(error).splitlines()[0]
            print(f"{weight_format} {kernel}: {found}", flush=True)


if __name__ == "__main__":
    main()
