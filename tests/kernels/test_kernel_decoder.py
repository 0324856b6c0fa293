"""The kernels of kernels/decoder/ in checked mode: results within the bound, no access outside of tensors."""

import pytest
import torch

from tests.support.decoder_reference import (
    ACTIVATIONS,
    check,
    exact_activation,
    exact_norm,
    exact_rotary,
    rotary_magnitude,
)
from tests.support.kernels.decoder import run_activation, run_norm, run_rotary, run_write_cache
from tests.support.reference import random

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32

# Columns, rows, dtype, whether there is a residual, elements between rows.
NORMS = [
    (1, 1, FLOAT, False, 0),
    (33, 3, HALF, True, 7),
    (777, 2, BFLOAT, True, 0),
    (8200, 2, FLOAT, False, 3),  # all threads, and a tail in the second iteration
]


@pytest.mark.parametrize(("N", "M", "dtype", "has_residual", "gap"), NORMS)
def test_norm(N: int, M: int, dtype: torch.dtype, has_residual: bool, gap: int) -> None:
    x, weight = random(M, N, dtype=dtype), random(N, dtype=HALF, seed=1)
    residual = random(M, N, dtype=dtype, seed=2) if has_residual else None
    got, total = run_norm(x, weight, eps=1e-3, offset=1.0, residual=residual, gap=gap)
    if residual is not None:
        x = x + residual
        assert torch.equal(total, x)
    exact = exact_norm(x.double(), weight.double(), 1e-3, 1.0)
    check(got, exact, exact_norm(x.double(), weight.double().abs(), 1e-3, 1.0).abs())


# Heads of q and k, B, S, D, rotated elements, dtype, flags.
ROTATIONS = [
    (3, 2, 2, 3, 16, 16, HALF, ()),
    (1, 4, 1, 2, 70, 70, FLOAT, ("Interleaved",)),
    (2, 1, 2, 1, 12, 6, BFLOAT, ()),  # the last elements are copied
    (2, 1, 1, 3, 40, 10, FLOAT, ("Interleaved", "PerPair")),
    (1, 1, 1, 2, 8, 8, FLOAT, ("Transposed",)),
    (3, 2, 2, 3, 8, 8, FLOAT, ("TokenRowsQ",)),
    (2, 3, 2, 2, 8, 6, HALF, ("TokenRowsK",)),
]


@pytest.mark.parametrize(("q_heads", "k_heads", "B", "S", "D", "R", "dtype", "flags"), ROTATIONS)
def test_rotary(
    q_heads: int, k_heads: int, B: int, S: int, D: int, R: int, dtype: torch.dtype, flags: tuple[str, ...]
) -> None:
    q, k = random(B, q_heads, S, D, dtype=dtype), random(B, k_heads, S, D, dtype=dtype, seed=1)
    columns = R // 2 if "PerPair" in flags else R
    cos, sin = random(1, S, columns, dtype=HALF, seed=2), random(B, S, columns, dtype=HALF, seed=3)
    interleaved = "Interleaved" in flags
    whole = [t.double().expand(B, -1, -1) for t in (cos, sin)]
    if "PerPair" in flags:
        whole = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in whole]
    if "Transposed" in flags:  # element i is multiplied by the sine of element j, with the opposite sign
        whole[1] = -whole[1].roll(R // 2, -1)
    for got, x in zip(run_rotary(q, k, cos, sin, *flags), (q, k), strict=True):
        wide = (x.double(), *whole)
        check(got, exact_rotary(*wide, interleaved), rotary_magnitude(*wide, interleaved))


# B, heads, S, sizes of a key and a value, tokens of the cache, start, dtype.
CACHES = [
    (2, 3, 2, 5, 33, 9, 7, HALF),  # up to the last token
    (1, 1, 3, 40, 8, 3, 0, BFLOAT),  # the whole cache
    (2, 5, 1, 16, 16, 6, 2, FLOAT),
    (2, 2, 3, 8, 4, 5, 3, FLOAT),  # one token does not fit
    (1, 2, 2, 4, 8, 5, -1, HALF),
]


@pytest.mark.parametrize(("B", "heads", "S", "k_size", "v_size", "length", "start", "dtype"), CACHES)
def test_write_cache(
    B: int, heads: int, S: int, k_size: int, v_size: int, length: int, start: int, dtype: torch.dtype
) -> None:
    new = random(B, heads, S, k_size, dtype=dtype), random(B, heads, S, v_size, dtype=dtype, seed=1)
    fits = 0 <= start <= length - S
    for got, x in zip(run_write_cache(*new, length, start), new, strict=True):
        expected = torch.full_like(got, 7.0)
        if fits:
            expected[:, :, start : start + S] = x
        else:
            expected[:, :, :S] = float("nan")
        assert torch.equal(got.nan_to_num(99.0), expected.nan_to_num(99.0))


@pytest.mark.parametrize("options", ACTIVATIONS, ids=lambda options: options["activation"])
def test_activation(options: dict) -> None:
    for M, N, dtype, interleaved in ((3, 35, FLOAT, False), (9, 70, HALF, True), (5, 64, BFLOAT, False)):
        both = 3 * random(M, 2 * N, dtype=dtype)
        gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
        exact = exact_activation(gate.double(), up.double(), **options)
        got = run_activation(both, interleaved=interleaved, **options)
        check(got, exact, gate.double().abs() * (up.double().abs() + 1))
