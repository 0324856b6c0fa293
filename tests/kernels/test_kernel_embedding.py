"""Compares the embedding kernel with the exact weight, with tails in N and K, and with ids and a perm out of range."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support import reference
from tests.support.kernels.cases import problem
from tests.support.kernels.problems import make_inputs, run_embedding

# weight_format, N, K, has_perm, dtype of the ids, number of ids
TABLES = [
    ("uint4", 7, 40, True, torch.int64, 5),
    ("uint4b8", 64, 512, False, torch.int32, 4),
    ("nvfp4", 65, 528, False, torch.int64, 9),
    ("lut4", 33, 72, True, torch.int32, 1),
    ("uint5", 33, 72, False, torch.int32, 2),
]


@pytest.mark.parametrize(("weight_format", "N", "K", "has_perm", "ids_dtype", "count"), TABLES)
def test_embedding(weight_format: str, N: int, K: int, has_perm: bool, ids_dtype: torch.dtype, count: int) -> None:
    """Compares in fp32, in which at most two operations round."""
    p = problem(1, N, K, weight_format=weight_format, dtype=torch.float32, group_size=16, has_perm=has_perm)
    inputs = make_inputs(p)
    ids = torch.from_numpy(np.random.default_rng(N).integers(0, N, count)).to(ids_dtype)
    ids[-1] = N - 1
    order = slice(None) if inputs.perm is None else np.argsort(inputs.perm)
    exact, magnitude = (part[order][:, ids.numpy()].T for part in (inputs.weight.exact, inputs.weight.magnitude))
    error = np.abs(reference.to_numpy(run_embedding(p, ids)) - exact)
    assert (error <= 2.0**-23 * magnitude).all()


@pytest.mark.parametrize("N", [7, 64])
def test_an_unknown_id_gives_a_row_of_nan(N: int) -> None:
    p = problem(1, N, 40, weight_format="uint4b8", dtype=torch.float32, group_size=8)
    got = run_embedding(p, torch.tensor([N - 1, N, -1, 2**40, 0]))
    assert got.isnan().all(1).tolist() == [False, True, True, True, False]
    assert not got[[0, 4]].isnan().any()


def test_a_perm_out_of_range_writes_nothing() -> None:
    p = problem(1, 8, 40, weight_format="uint4b8", dtype=torch.float32, group_size=8, has_perm=True)
    inputs, ids = make_inputs(p), torch.tensor([3, 7])
    perm = inputs.perm.copy()
    perm[[3, 39]] = [p.K, -1]
    got = run_embedding(p, ids, inputs=replace(inputs, perm=perm))
    lost = inputs.perm[[3, 39]]
    kept = np.delete(inputs.perm, [3, 39])
    assert torch.equal(got[:, kept], run_embedding(p, ids)[:, kept])
    assert got[:, lost].isnan().all()  # the kernel wrote nothing here, so these elements keep the initial NaN
