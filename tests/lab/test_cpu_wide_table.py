"""Tests which limit lab's CPU table finds for invented measurements, and its counts of instructions by single steps."""

import platform
import sys
from typing import Any

import pytest
import torch

import torch_marlin_metal as tmm
from lab.cpu.cpu_instructions import ALL, count
from lab.cpu.cpu_wide_table import counts_of, product_us, reason

KINDS = {"fma_512": 0.0, "tile_bf16": 0.0}


def made(
    *,
    us: float = 100.0,
    rival_us: float = 90.0,
    products: float = 1e-3,
    ours: float = 1.0,
    theirs: float | None = 2.0,
    cached: float = 30.0,
) -> tuple[dict[str, Any], dict[Any, dict[str, float]]]:
    """Returns a cell for 1000 x 1000 weights of 1 MB, and counts. A plain read at 100 GB/s takes 10 us."""
    line = {
        "isa": "amx", "a": "fp32", "M": 8, "weight": "Q8_0", "shape": "1000x1000", "bytes": 1e6, "read": 100e9,
        "us": us, "rivals": {"dense": "dense"}, "rival_us": {"dense": rival_us}, "rates": {"fma_512": 1e9},
        "cached_us": cached,
    }  # fmt: skip
    found = [{"isa": "amx", "a": "fp32", "M": 8, "kernel": "Q8_0", "counts": KINDS | {"fma_512": products, ALL: ours}}]
    if theirs is not None:
        found.append({"isa": "amx", "a": "fp32", "M": 8, "kernel": "dense", "counts": KINDS | {ALL: theirs}})
    return line, counts_of(found)


@pytest.mark.parametrize(
    ("cell", "letter"),
    [
        ({"us": 11.0}, "m"),  # 0.91 of a plain read
        ({"products": 0.08}, "p"),  # the products take 80 of 100 us
        ({"products": 0.06, "rival_us": 50.0}, "p"),  # products take 60 us, and the rival's kernel 50 us
        ({"products": 0.04}, "w"),
        ({"ours": 3.0}, "i"),
        ({"ours": 3.0, "theirs": None}, "w"),
        ({"cached": 75.0}, "c"),  # with data in caches, the kernel takes 75 of 100 us
        ({"cached": 60.0, "rival_us": 50.0}, "c"),
        ({"cached": 75.0, "ours": 3.0}, "i"),
        ({"us": 40.0, "cached": 27.0}, "b"),  # with data in caches 27 us, and a plain read 10 us
    ],
)
def test_reason_of_a_cell(cell: dict[str, Any], letter: str) -> None:
    line, counts = made(**cell)
    assert reason(line, counts, "dense") == letter


def test_time_of_products_follows_the_rows() -> None:
    line, counts = made(products=0.04)
    assert product_us(counts, line) == pytest.approx(40)
    assert product_us(counts, line | {"M": 16}) == pytest.approx(80)
    tiles = counts_of([{"isa": "amx", "a": "fp32", "M": 8, "kernel": "Q8_0", "counts": {"tile_bf16": 0.01, ALL: 1}}])
    with_tiles = line | {"rates": {"tile_bf16": 1e9}}
    assert product_us(tiles, with_tiles) == product_us(tiles, with_tiles | {"M": 16}) == pytest.approx(10)


@pytest.mark.skipif(
    not (sys.platform == "linux" and platform.machine() == "x86_64"), reason="single steps need x86-64 Linux"
)
def test_instructions_of_a_product_are_counted() -> None:
    """Two rows of fp32 need one multiply-add for each vector of codes and row, and one to scale each group's sums."""
    K, N, M = 64, 64, 2
    wide = {"avx2": 8, "avx512": 16, "amx": 16}.get(tmm.cpu_capability().isa)
    if wide is None:
        pytest.skip("portable code has no vectors")
    weight = tmm.quantize_weight(torch.ones(N, K, device="cpu"), "uint4b8", 32)
    a = torch.ones(M, K, device="cpu")
    tmm.gemm(a, weight)
    counts = count(lambda: tmm.gemm(a, weight))
    assert counts["fma_256" if wide == 8 else "fma_512"] == M * (K + K // 32) * N // wide
    assert counts["tile_bytes"] == counts["tile_bf16"] == 0
    assert counts[ALL] > 10 * M * K * N // wide
