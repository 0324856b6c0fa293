"""Tests that mistakes in tensor kernels are noticed: the result is wrong, or checked mode reports a fault."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from tensor_kernels import REGISTERS, SHAPES, TENSORS, bound, library, operand

from softmetal.device import FaultKind, KernelFault

SEEDS = (1, 2, 3, 6)  # Each seed determines the layout of elements over threads and the order of sums.
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
LAYOUT = """const uint q = simd_index() >> 2, s = simd_index();
    const array<int, 2> at{int(((q & 2) | (s & 1)) * 4 + i % 4 + i / 8 % 2 * 16),
                           int((q & 4) | ((s >> 1) & 3)) + i / 4 % 2 * 8 + i / 16 * 16};"""


@dataclass(frozen=True)
class Seed:
    """A mistake that replaces `text` in a kernel.

    `caught` is the fault that must be reported, or "wrong" if the result must be wrong.
    """

    name: str
    kernel: str
    text: str
    mistake: str
    caught: FaultKind | str
    nth: int = 0  # selects the occurrence of `text` to replace, counted from 0


TABLE = [
    Seed("no barrier before the product", "f", BARRIER, "", FaultKind.RACE),
    Seed("no barrier after the product", "f", BARRIER, "", FaultKind.RACE, 1),
    Seed("a barrier without threadgroup memory", "f", BARRIER, "threadgroup_barrier(mem_flags::mem_device);", FaultKind.WRONG_FLAG),
    Seed("a barrier of the simdgroup", "f", BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);", FaultKind.RACE),
    Seed("the K tail is read past the matrix", "f", "x < k && y < n", "y < n", FaultKind.OUT_OF_BOUNDS),
    Seed("the N edge is read past the matrix", "f", "x < k && y < n", "x < k", FaultKind.OUT_OF_BOUNDS),
    Seed("K tail dropped", "f", "step < k; step", "step + 32 <= k; step", "wrong"),
    Seed("extents of the left operand exchanged", "f", "left(a, dextents<int, 2>(k, m)", "left(a, dextents<int, 2>(m, k)", "wrong"),
    Seed("K extent too large", "f", "left(a, dextents<int, 2>(k, m))", "left(a, dextents<int, 2>(k + 32, m), array<int, 2>{1, k})", FaultKind.OUT_OF_BOUNDS),
    Seed("M extent too large", "f", "left(a, dextents<int, 2>(k, m))", "left(a, dextents<int, 2>(k, m + 32))", FaultKind.OUT_OF_BOUNDS),
    Seed("extents of the result exchanged", "f", "result(c, dextents<int, 2>(n, m)", "result(c, dextents<int, 2>(m, n)", "wrong"),
    Seed("M extent of the result too large", "f", "result(c, dextents<int, 2>(n, m)", "result(c, dextents<int, 2>(n, m + 64)", FaultKind.OUT_OF_BOUNDS),
    Seed("stride of the tile", "f", "array<int, 2>{1, 40}", "array<int, 2>{1, 32}", FaultKind.UNINITIALISED),
    Seed("rows and columns of the tile exchanged", "f", "array<int, 2>{1, 40}", "array<int, 2>{40, 1}", "wrong"),
    Seed("right operand not transposed", "f", "32, 32, false, true, false", "32, 32, false, false, false", "wrong"),
    Seed("each step overwrites the sum", "f", "mode::multiply_accumulate", "mode::multiply", "wrong"),
    Seed("the sum starts undefined", "f", "sum[e] = 0.0f;", "continue;", FaultKind.UNINITIALISED),
    Seed("K step of another size", "f", "step += 32", "step += 64", "wrong"),
    Seed("origin of the rows exchanged", "f", "left.slice(0, group.y * 64)", "left.slice(group.y * 64, 0)", "wrong"),
    Seed("origin of the step exchanged", "f", "rows.slice(step, 0)", "rows.slice(0, step)", "wrong"),
    Seed("origin of the result exchanged", "f", "result.slice(group.x * 32, group.y * 64)", "result.slice(group.y * 64, group.x * 32)", FaultKind.RACE_GROUPS),
    Seed("a promised extent past the matrix", "f", "rows.slice(step, 0)", "rows.slice<32, 64>(step, 0)", FaultKind.OUT_OF_BOUNDS),
    Seed("leading dimension of a transposed operand", "nt", "(TB ? K : N)", "N", FaultKind.OUT_OF_BOUNDS),
    Seed("rows and columns of the sum exchanged", "nn", "c[at[1] * N + at[0]]", "c[at[0] * N + at[1]]", FaultKind.OUT_OF_BOUNDS),
    Seed("elements that do not exist are stored", "odd", "if (sum.get_mask(i)) c", "c", FaultKind.OUT_OF_BOUNDS),
    Seed("elements that do not exist are loaded", "odd", "right.is_valid_element(i) ? ", "true ? ", FaultKind.OUT_OF_BOUNDS),
    Seed("MLX's layout for another shape", "tt", "const auto at = sum.get_multidimensional_index(i);", LAYOUT, "wrong"),
    Seed("the product added twice", "nn", "op.run(left, right, sum);", "op.run(left, right, sum); op.run(left, right, sum);", "wrong"),
]  # fmt: skip


def run(kernel: str, source: str, seed: int) -> bool:
    """Runs a kernel in checked mode. Returns whether the result is right."""
    rng = np.random.default_rng(4)
    if kernel == "f":
        m, n, k = 70, 45, 83
        stored_a, a = operand(rng, (m, k), "half")
        stored_b, b = operand(rng, (n, k), "half")
        b, start = b.T, 0
        groups, group, rest = (-(-n // 32), -(-m // 64), 1), 128, [np.array([m, n, k, 0], np.int32)]
    else:
        m, n, k = SHAPES[kernel]
        stored_a, a = operand(rng, (k, m) if kernel in ("tn", "tt") else (m, k), "half")
        stored_b, b = operand(rng, (n, k) if kernel in ("nt", "tt", "odd") else (k, n), "half")
        a, b = (a.T if kernel in ("tn", "tt") else a), (b.T if kernel in ("nt", "tt", "odd") else b)
        groups, group, rest, start = (1, 1, 1), 32, [], 1
    c = np.full(m * n, np.nan, np.float32)
    library(source, "half", True).kernel(kernel).launch(
        groups=groups, group=group, buffers=[stored_a, stored_b, c, *rest], seed=seed, perturb_seed=seed
    )
    return bool((np.abs(c.reshape(m, n) - (a @ b + start)) <= bound(a, b, k)).all())


def outcome(kernel: str, source: str) -> set[FaultKind | str]:
    found: set[FaultKind | str] = set()
    for seed in SEEDS:
        try:
            found.add("right" if run(kernel, source, seed) else "wrong")
        except KernelFault as fault:
            found |= {f.kind for f in fault.faults}
    return found


def text_of(kernel: str) -> str:
    lane = "uint simd_index() { return __metal_get_thread_index_in_simdgroup(ushort()); }\n"
    return TENSORS if kernel == "f" else lane + REGISTERS


@pytest.mark.parametrize("kernel", sorted({s.kernel for s in TABLE}))
def test_without_a_mistake(kernel: str) -> None:
    assert outcome(kernel, text_of(kernel)) == {"right"}


@pytest.mark.parametrize("seed", TABLE, ids=lambda s: s.name)
def test_the_mistake_is_caught(seed: Seed) -> None:
    parts = text_of(seed.kernel).split(seed.text)
    assert len(parts) > seed.nth + 1
    source = seed.text.join(parts[: seed.nth + 1]) + seed.mistake + seed.text.join(parts[seed.nth + 1 :])
    assert seed.caught in outcome(seed.kernel, source)
