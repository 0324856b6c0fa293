"""Compares the model of benchmarks/metal/decode_token.py, the gain from commits, with values worked out by hand."""

import runpy
from pathlib import Path

import pytest

token = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "metal" / "decode_token.py"))
BOUNDARY, WAIT = token["BOUNDARY_SECONDS"], token["WAIT_SECONDS"]


def test_one_commit_adds_the_host_to_the_gpu_and_more_overlap_them() -> None:
    work = [(2e-3, 2e-3)] * 4
    seconds, buffers = token["token_seconds"](work, 1e-3, 0)
    assert (seconds, buffers) == (pytest.approx(4e-3 + BOUNDARY + 8e-3 + WAIT), 1)
    seconds, buffers = token["token_seconds"](work, 1e-3, 2e-3)
    assert (seconds, buffers) == (pytest.approx(1e-3 + 4 * BOUNDARY + 8e-3 + WAIT), 4)
    # If the host is slower, the GPU waits for it. Only the last command buffer runs after the host has ended.
    seconds, _ = token["token_seconds"](work, 5e-3, 2e-3)
    assert seconds == pytest.approx(20e-3 + BOUNDARY + 2e-3 + WAIT)


def test_a_token_has_every_product_and_kernel() -> None:
    work = token["operations"]("M1")
    assert len(work) == token["LAYERS"] * (len(token["PRODUCTS"]) + token["OTHER_KERNELS"]) + 1
    assert sum(predicted > 0 for _, predicted in work) == token["LAYERS"] * len(token["PRODUCTS"]) + 1
