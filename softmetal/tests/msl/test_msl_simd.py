"""Compares operations across a simdgroup or a quadgroup with NumPy, lane by lane, with all or only some lanes
active.
"""

import numpy as np
import pytest
from msl_kernels import INTEGERS, compile_metal, run, type_name

RNG = np.random.default_rng
REDUCTIONS = {
    "sum": (np.add, 0),
    "product": (np.multiply, 1),
    "min": (np.minimum, None),
    "max": (np.maximum, None),
    "and": (np.bitwise_and, None),
    "or": (np.bitwise_or, None),
    "xor": (np.bitwise_xor, None),
}
BITWISE = ("and", "or", "xor")
# Masks of the active lanes. In the first mask, all lanes are active.
MASKS = [0xFFFFFFFF, 0x00000001, 0x80000000, 0x0F0F00FF, 0x5A5A1234, 0xFFFF0000]


def _fold(op: np.ufunc, values: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Folds in the documented order: lanes half the width apart, then a quarter, and so on. Skips inactive lanes."""
    values, active = values.copy(), active.copy()
    width = len(values)
    while width > 1:
        width //= 2
        both = active[:width] & active[width : 2 * width]
        with np.errstate(all="ignore"):
            joined = op(values[:width], values[width : 2 * width])
        shape = (-1,) + (1,) * (values.ndim - 1)
        values[:width] = np.where(
            both.reshape(shape),
            joined,
            np.where(active[:width].reshape(shape), values[:width], values[width : 2 * width]),
        )
        active[:width] |= active[width : 2 * width]
    return values[0]


def _lanes(mask: int, simdgroups: int) -> np.ndarray:
    return np.tile(mask >> np.arange(32) & 1 == 1, simdgroups)


def _some_lanes(functions: list[str], metal: str) -> str:
    """Returns the source of one kernel for each function f, named k_f. Only the lanes of a mask call f."""
    return "".join(
        f"""
kernel void k_{f}(device const {metal}* a [[buffer(0)]], device {metal}* out [[buffer(1)]],
    constant uint& mask [[buffer(2)]],
              uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {{
  if (mask >> lane & 1) out[i] = {f}(a[i]);
}}"""
        for f in functions
    )


def _values(dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return RNG(1).integers(info.min, info.max, shape, dtype, endpoint=True)
    return RNG(2).normal(0, 2, shape).astype(dtype)


TYPES = [np.float32, np.float16, *(t for t in INTEGERS if np.dtype(t).itemsize < 8)]


@pytest.mark.parametrize("dtype", TYPES, ids=type_name)
@pytest.mark.parametrize("scope", ["simd", "quad"])
def test_reductions(scope: str, dtype: type) -> None:
    names = [n for n in REDUCTIONS if np.issubdtype(dtype, np.integer) or n not in BITWISE]
    width = 32 if scope == "simd" else 4
    source = _some_lanes([f"{scope}_{n}" for n in names], type_name(dtype))
    for name in names:
        for mask in MASKS:
            a = _values(dtype, (64,))
            out = np.zeros_like(a)
            run(source, a, out, np.uint32([mask]), threads=64, group=64, kernel=f"k_{scope}_{name}")
            active = _lanes(mask, 2)
            for first in range(0, 64, width):
                part = slice(first, first + width)
                if not active[part].any():
                    continue
                wanted = _fold(REDUCTIONS[name][0], a[part], active[part])
                np.testing.assert_array_equal(
                    out[part], np.where(active[part], wanted, 0).astype(dtype), f"{name} {mask:#x}"
                )


@pytest.mark.parametrize("dtype", TYPES, ids=type_name)
@pytest.mark.parametrize("scope", ["simd", "quad"])
def test_prefix_operations(scope: str, dtype: type) -> None:
    width = 32 if scope == "simd" else 4
    functions = [f"{scope}_prefix_{k}_{n}" for k in ("inclusive", "exclusive") for n in ("sum", "product")]
    source = _some_lanes(functions, type_name(dtype))
    for kind in ("inclusive", "exclusive"):
        for name in ("sum", "product"):
            op, identity = REDUCTIONS[name]
            for mask in MASKS:
                a = _values(dtype, (64,))
                out = np.zeros_like(a)
                kernel = f"k_{scope}_prefix_{kind}_{name}"
                run(source, a, out, np.uint32([mask]), threads=64, group=64, kernel=kernel)
                active = _lanes(mask, 2)
                for first in range(0, 64, width):
                    total = None
                    for lane in np.flatnonzero(active[first : first + width]) + first:
                        before = total
                        with np.errstate(all="ignore"):
                            total = a[lane] if total is None else op(total, a[lane])
                        wanted = total if kind == "inclusive" else dtype(identity) if before is None else before
                        assert out[lane] == wanted or (np.isnan(out[lane]) and np.isnan(wanted)), (
                            kind,
                            name,
                            mask,
                            lane,
                        )


# For each shuffle: the lane from which `lane` reads, if the argument is n and the group has w lanes.
SHUFFLES = {
    "shuffle": lambda lane, n, w: n,
    "broadcast": lambda lane, n, w: n,
    "shuffle_xor": lambda lane, n, w: lane ^ n,
    "shuffle_up": lambda lane, n, w: lane - n if lane >= n else lane,
    "shuffle_down": lambda lane, n, w: lane + n if lane + n < w else lane,
    "shuffle_rotate_up": lambda lane, n, w: (lane - n) % w,
    "shuffle_rotate_down": lambda lane, n, w: (lane + n) % w,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8, np.int32, np.uint16], ids=type_name)
@pytest.mark.parametrize("scope", ["simd", "quad"])
def test_shuffles(scope: str, dtype: type) -> None:
    width = 32 if scope == "simd" else 4
    metal = type_name(dtype)
    source = "".join(
        f"""
kernel void k_{name}(device const {metal}* a [[buffer(0)]], device {metal}* out [[buffer(1)]],
    constant uint& n [[buffer(2)]],
                     uint i [[thread_position_in_grid]]) {{ out[i] = {scope}_{name}(a[i], n); }}"""
        for name in SHUFFLES
    )
    for name, source_lane in SHUFFLES.items():
        a = _values(dtype, (64,))
        for n in range(width):
            out = np.zeros_like(a)
            run(source, a, out, np.uint32([n]), threads=64, group=64, kernel=f"k_{name}")
            wanted = [a[i - i % width + source_lane(i % width, n, width)] for i in range(64)]
            np.testing.assert_array_equal(out, wanted, f"{name} {n}")


def test_shuffle_with_another_source_lane_for_each_lane() -> None:
    source = """
kernel void k(device const float2* a [[buffer(0)]], device const ushort* from [[buffer(1)]],
    device float2* out [[buffer(2)]],
              uint i [[thread_position_in_grid]]) { out[i] = simd_shuffle(a[i], from[i]); }"""
    a, order = RNG(3).normal(0, 1, (32, 2)).astype(np.float32), RNG(4).permutation(32).astype(np.uint16)
    out = np.zeros_like(a)
    run(source, a, order, out, threads=32)
    np.testing.assert_array_equal(out, a[order])


@pytest.mark.parametrize("modulo", [32, 16, 8, 2])
def test_shuffle_and_fill(modulo: int) -> None:
    source = """
kernel void k(device const int* a [[buffer(0)]], device const int* f [[buffer(1)]], device int* out [[buffer(2)]],
              constant ushort2& n [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  out[i] = simd_shuffle_and_fill_up(a[i], f[i], n.x, n.y);
  out[i + 32] = simd_shuffle_and_fill_down(a[i], f[i], n.x, n.y);
  out[i + 64] = simd_shuffle_and_fill_up(a[i], f[i], n.x);
  out[i + 96] = simd_shuffle_and_fill_down(a[i], f[i], n.x);
}"""
    a, f = np.arange(32, dtype=np.int32), np.arange(100, 132, dtype=np.int32)
    lanes = np.arange(32)
    for delta in range(modulo):
        out = np.zeros(128, np.int32)
        run(source, a, f, out, np.uint16([delta, modulo]), threads=32)
        for part, m in ((0, modulo), (64, 32)):
            up = np.where(lanes % m >= delta, a[lanes - delta], f[np.minimum(lanes - delta + m, 31)])
            np.testing.assert_array_equal(out[part : part + 32], up)
            down = np.where(
                lanes % m + delta < m, a[np.minimum(lanes + delta, 31)], f[np.maximum(lanes + delta - m, 0)]
            )
            np.testing.assert_array_equal(out[part + 32 : part + 64], down)


@pytest.mark.parametrize("mask", MASKS)
def test_votes_and_active_lanes(mask: int) -> None:
    source = """
kernel void k(device const bool* a [[buffer(0)]], device uint* out [[buffer(1)]], constant uint& mask [[buffer(2)]],
              uint lane [[thread_index_in_simdgroup]]) {
  if (mask >> lane & 1) {
    device uint* o = out + lane * 10;
    o[0] = uint(static_cast<simd_vote::vote_t>(simd_ballot(a[lane])));
    o[1] = uint(ulong(simd_active_threads_mask()));
    o[2] = simd_all(a[lane]); o[3] = simd_any(a[lane]); o[4] = simd_is_first();
    o[5] = simd_broadcast_first(lane * 3 + 1);
    o[6] = simd_all(lane < 32); o[7] = simd_any(lane > 32);
    o[8] = simd_ballot(true).all(); o[9] = simd_ballot(false).any();
  }
}"""
    active = _lanes(mask, 1)
    for a in (np.zeros(32, np.bool_), np.ones(32, np.bool_), RNG(mask).integers(0, 2, 32).astype(np.bool_)):
        out = np.full((32, 10), 77, np.uint32)
        run(source, a, out, np.uint32([mask]), threads=32)
        ballot = int((a & active).astype(np.uint64) @ (1 << np.arange(32, dtype=np.uint64)))
        first = int(np.flatnonzero(active)[0])
        for lane in range(32):
            wanted = [
                ballot,
                mask,
                (a | ~active).all(),
                (a & active).any(),
                lane == first,
                first * 3 + 1,
                1,
                0,
                active.all(),
                0,
            ]
            np.testing.assert_array_equal(out[lane], wanted if active[lane] else [77] * 10)


@pytest.mark.parametrize("mask", MASKS)
def test_quad_votes(mask: int) -> None:
    source = """
kernel void k(device const bool* a [[buffer(0)]], device uint* out [[buffer(1)]], constant uint& mask [[buffer(2)]],
              uint lane [[thread_index_in_simdgroup]], uint in_quad [[thread_index_in_quadgroup]],
              uint quad [[quadgroup_index_in_threadgroup]]) {
  if (mask >> lane & 1) {
    device uint* o = out + lane * 7;
    o[0] = uint(quad_vote::vote_t(quad_ballot(a[lane]))); o[1] = uint(quad_vote::vote_t(quad_active_threads_mask()));
    o[2] = quad_all(a[lane]); o[3] = quad_any(a[lane]); o[4] = quad_is_first(); o[5] = quad_broadcast_first(lane);
    o[6] = quad * 4 + in_quad;
  }
}"""
    active, a = _lanes(mask, 1), RNG(5).integers(0, 2, 32).astype(np.bool_)
    out = np.zeros((32, 7), np.uint32)
    run(source, a, out, np.uint32([mask]), threads=32)
    bits = 1 << np.arange(4)
    for lane in np.flatnonzero(active):
        on, votes = active[lane // 4 * 4 :][:4], a[lane // 4 * 4 :][:4]
        first = lane // 4 * 4 + np.flatnonzero(on)[0]
        wanted = [(on & votes) @ bits, on @ bits, (votes | ~on).all(), (votes & on).any(), lane == first, first, lane]
        np.testing.assert_array_equal(out[lane], wanted)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_vectors_are_reduced_by_element(width: int) -> None:
    source = f"""
kernel void k(device const packed_float{width}* a [[buffer(0)]], device packed_float{width}* out [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {{
  float{width} v = a[i];
  out[i] = simd_sum(v); out[32 + i] = simd_max(v); out[64 + i] = simd_prefix_inclusive_sum(v);
    out[96 + i] = simd_shuffle_xor(v, 5);
}}"""
    a = RNG(6).normal(0, 1, (32, width)).astype(np.float32)
    out = np.zeros((4, 32, width), np.float32)
    run(source, a, out, threads=32)
    every = np.ones(32, np.bool_)
    np.testing.assert_array_equal(out[0], np.tile(_fold(np.add, a, every), (32, 1)))
    np.testing.assert_array_equal(out[1], np.tile(a.max(0), (32, 1)))
    np.testing.assert_array_equal(out[2], np.add.accumulate(a, 0, dtype=np.float32))
    np.testing.assert_array_equal(out[3], a[np.arange(32) ^ 5])


def test_a_simdgroup_that_is_not_full() -> None:
    parameters = "device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]"
    source = f"kernel void k({parameters}) {{ out[i] = simd_sum(int(i) + 1); }}"
    out = np.zeros(21, np.int32)
    run(source, out, threads=21, group=21)
    assert (out == 21 * 22 // 2).all()


def test_a_bfloat_can_be_shuffled_as_its_bits() -> None:
    """Metal 3.1 has no simd_shuffle for bfloat, as candle's reduce.metal says.

    MLX defines its own functions for bfloat.
    """
    library = compile_metal("""
kernel void k(device const bfloat* a [[buffer(0)]], device bfloat* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  out[i] = as_type<bfloat>(simd_shuffle_down(as_type<ushort>(a[i]), 3));
}""")
    a = RNG(7).integers(0, 1 << 16, 32).astype(np.uint16)
    out = np.zeros_like(a)
    library.kernel("k").launch(threads=32, group=32, buffers=[a, out])
    np.testing.assert_array_equal(out, a[np.where(np.arange(32) < 29, np.arange(32) + 3, np.arange(32))])
