"""Kernels at offsets beyond 2^32 elements, in sparse tensors whose rows are a billion elements apart.

Each test runs the first threadgroups of a far wider problem. Without a cast to 64 bits in `kernels/gemm/`, an offset
wraps to memory that holds zeros, or the output stays NaN.
"""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from softmetal.device import Buffer
from tests.support import reference
from tests.support.kernels import launch as launching
from tests.support.kernels import problems
from tests.support.kernels.cases import problem
from tests.support.kernels.fused import run_fused
from tests.support.kernels.launch import Guarded, facts, number, place, place_output
from tests.support.kernels.problems import Problem, check, check_dequantize, make_inputs, run_gemv
from tests.support.kernels.tiles import STAGED, run_staged

STRIDE = 2**30 + 64  # elements from one row to the next: row 4 is beyond 2^32
STRUCTS = {"reduce": "ReduceParams", "dequantize": "DequantizeParams"}


def _spread(buffer: Guarded, rows: int) -> tuple[Buffer, np.ndarray, np.ndarray]:
    """Copies a dense matrix with `buffer.columns` columns to sparse memory, with rows STRIDE elements apart.

    Returns:
        The sparse buffer, the first bytes of its rows, and the first bytes of the rows of `buffer`.
    """
    dense = buffer.array[buffer.offset :].reshape(rows, -1)
    sparse = Buffer.sparse((rows, dense.shape[1] // buffer.columns * STRIDE), np.uint8)
    near = sparse.array[:, : dense.shape[1]]
    near[...] = dense
    return sparse, near, dense


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches problems of 64 columns as the first columns of a problem with N = STRIDE."""
    plain = launching.launch

    def spread_launch(kernel, buffers, **options):
        p: Problem = spread_launch.problem
        of_output = p.K if kernel == "dequantize" else p.M
        slots = {"Packed": p.K // 8, "Scales": p.K // p.group_size, "Zeros": p.K // p.group_size, "Out": of_output}
        layout, params = facts()["structs"][STRUCTS.get(kernel, "GemmParams")], bytearray(buffers["Params"])
        struct.pack_into("<I", params, layout["N"], STRIDE)
        bound, copies = {**buffers}, []
        if "Partials" in buffers:
            slots["Partials"] = len(buffers["Partials"].array[buffers["Partials"].offset :]) // (4 * p.N)
        if "A" in buffers:
            slots["A"] = p.M
            struct.pack_into("<q", params, layout["a_row_stride"], STRIDE)
        for name, rows in slots.items():
            if name not in buffers:
                continue
            buffers[name].columns = p.K if name == "A" else p.N
            bound[name], near, dense = _spread(buffers[name], rows)
            copies.append((near, dense))
        counters = plain(kernel, bound | {"Params": bytes(params)}, **options)
        for near, dense in copies:
            dense[...] = near
        return counters

    for module in (launching, problems):
        monkeypatch.setattr(module, "launch", spread_launch)
    return spread_launch


def _problem(weight_format: str, K: int, **fields) -> Problem:
    formats = {"weight_format": weight_format, "dtype": torch.float32, "zeros_dtype": torch.float16}
    return problem(8, 64, K, **formats | {"group_size": 16} | fields)


@pytest.mark.parametrize("splits", [1, 2])
def test_gemv(wide, splits: int) -> None:
    wide.problem = p = _problem("uint4", 512, bias_dtype=torch.float16)
    check(p, run_gemv(p, rows=4, simdgroups=4, splits=splits, checked=False), raw_codes=True)


def test_fused(wide) -> None:
    """With groups of 256, indices of scales fit in 32 bits. The planner refuses weights with 2^32 scales."""
    wide.problem = p = replace(_problem("uint4", 512, group_size=256), M=16)
    check(p, run_fused(p, rows=16, simdgroups=2, splits=2, checked=False), raw_codes=False)


def test_staged(wide) -> None:
    wide.problem = p = _problem("uint4", 128)
    check(p, run_staged(STAGED[0], p, checked=False), raw_codes=False)


def test_dequantize(wide) -> None:
    wide.problem = p = _problem("uint4", 128)
    check_dequantize(p, checked=False)


def test_embedding() -> None:
    """The columns of the table and the rows of the output are STRIDE elements apart."""
    p = _problem("uint4", 8 * number("kElementwiseWidth"))
    weight = make_inputs(p).weight
    ids = torch.arange(8, dtype=torch.int64) * 7
    buffers, constants = problems._weight_buffers(p, make_inputs(p))
    for name, rows in {"Packed": p.K // 8, "Scales": p.K // 16, "Zeros": p.K // 16}.items():
        buffers[name].columns = p.N
        buffers[name] = _spread(buffers[name], rows)[0]
    out = place_output((8, p.K), p.dtype)
    out.columns = p.K
    buffers["Out"], near, dense = _spread(out, 8)
    buffers |= {"A": place(ids), "Params": struct.pack("<5I", STRIDE, STRIDE, 16, len(ids), 8)}
    names = {"weight_format": p.weight_format, "element": "float32", "constants": constants}
    launching.launch_elementwise("embedding", p.K // 8, len(ids), buffers, **names, checked=False)
    dense[...] = near
    error = np.abs(reference.to_numpy(out.read((8, p.K), p.dtype)) - weight.exact.T[ids])
    assert (error <= 2.0**-23 * weight.magnitude.T[ids]).all()
