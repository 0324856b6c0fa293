"""Tests simdgroup_matrix (lane order, loads and stores, products of mixed types) and atomics."""

import numpy as np
import pytest
from msl_kernels import compile_metal, from_bfloat, refuse, run, to_bfloat

RNG = np.random.default_rng
LANES = np.arange(32)
ROW = 4 * (LANES >> 4) + ((LANES >> 1) & 3)
COLUMN = 2 * (2 * ((LANES >> 3) & 1) + (LANES & 1))
TYPES = {"half": np.float16, "float": np.float32}
LANE = "uint lane [[thread_index_in_simdgroup]]"


def _in_lanes(matrix: np.ndarray) -> np.ndarray:
    return np.stack([matrix[ROW, COLUMN], matrix[ROW, COLUMN + 1]], -1)


@pytest.mark.parametrize("metal", ["half", "float", "bfloat"])
@pytest.mark.parametrize("memory", ["device", "threadgroup"])
def test_load_gives_lanes_their_elements(metal: str, memory: str) -> None:
    copy = (
        f"threadgroup {metal} t[400]; for (int i = lane; i < 400; i += 32) t[i] = a[i];"
        " threadgroup_barrier(mem_flags::mem_threadgroup);"
    )
    source = f"""
kernel void k(device const {metal}* a [[buffer(0)]], device {metal}* out [[buffer(1)]], {LANE}) {{
  {copy if memory == "threadgroup" else f"device const {metal}* t = a;"}
  simdgroup_matrix<{metal}, 8, 8> m[4];
  simdgroup_load(m[0], t); simdgroup_load(m[1], t, 20); simdgroup_load(m[2], t, 20, ulong2(7, 3));
    simdgroup_load(m[3], t, 20, ulong2(7, 3), true);
  for (int i = 0; i < 4; ++i) for (int j = 0; j < 2; ++j) out[(i * 32 + lane) * 2 + j] = m[i].thread_elements()[j];
}}"""
    plane = RNG(1).permutation(400).astype(np.float32)
    stored = to_bfloat(plane) if metal == "bfloat" else plane.astype(TYPES[metal])
    out = np.zeros((4, 32, 2), stored.dtype)
    run(source, stored, out, threads=32)
    grid = stored.reshape(20, 20)
    wanted = [stored[:64].reshape(8, 8), grid[:8, :8], grid[3:11, 7:15], grid[3:11, 7:15].T]
    for got, matrix in zip(out, wanted, strict=True):
        np.testing.assert_array_equal(got, _in_lanes(matrix))


@pytest.mark.parametrize("metal", ["half", "float"])
@pytest.mark.parametrize("turned", [False, True])
def test_store_is_the_inverse_of_load(metal: str, turned: bool) -> None:
    source = f"""
kernel void k(device const {metal}* a [[buffer(0)]], device {metal}* out [[buffer(1)]], {LANE}) {{
  simdgroup_matrix<{metal}, 8, 8> m; simdgroup_load(m, a);
  simdgroup_store(m, out, 20, ulong2(5, 2), {str(turned).lower()});
  threadgroup {metal} t[64]; simdgroup_store(m, t); simdgroup_barrier(mem_flags::mem_threadgroup);
  out[400 + lane] = t[lane]; out[432 + lane] = t[32 + lane];
}}"""
    a = RNG(2).normal(0, 1, (8, 8)).astype(TYPES[metal])
    out = np.zeros(464, a.dtype)
    run(source, a, out, threads=32)
    wanted = np.zeros((20, 20), a.dtype)
    wanted[2:10, 5:13] = a.T if turned else a
    np.testing.assert_array_equal(out[:400].reshape(20, 20), wanted)
    np.testing.assert_array_equal(out[400:].reshape(8, 8), a)


def test_made_matrices() -> None:
    source = f"""
kernel void k(device float* out [[buffer(0)]], {LANE}) {{
  simdgroup_float8x8 m[5] = {{simdgroup_float8x8(3), make_filled_simdgroup_matrix<float, 8, 8>(2),
    make_diagonal_simdgroup_matrix<float, 8, 8>(5),
                              make_filled_simdgroup_matrix<float, 8>(0.5), simdgroup_float8x8(0)}};
  m[4].thread_elements()[0] = lane; m[4].thread_elements()[1] = -float(lane);
  simdgroup_float8x8 copy = m[4]; m[4] = m[0]; m[0] = copy;
  for (int i = 0; i < 5; ++i) simdgroup_store(m[i], out + 64 * i);
}}"""
    out = np.zeros((5, 8, 8), np.float32)
    run(source, out, threads=32)
    numbered = np.zeros((8, 8))
    numbered[ROW, COLUMN], numbered[ROW, COLUMN + 1] = LANES, -LANES
    eye = np.eye(8)
    np.testing.assert_array_equal(out, [numbered, np.full((8, 8), 2), 5 * eye, np.full((8, 8), 0.5), 3 * eye])


def _stored(metal: str, values: np.ndarray) -> np.ndarray:
    return to_bfloat(values) if metal == "bfloat" else values.astype(TYPES[metal])


def _value(metal: str, stored: np.ndarray) -> np.ndarray:
    return (from_bfloat(stored) if metal == "bfloat" else stored).astype(np.float64)


@pytest.mark.parametrize(
    "types",
    [
        ("float", "float", "float", "float"),
        ("half", "half", "half", "half"),
        ("float", "half", "half", "float"),
        ("float", "bfloat", "bfloat", "float"),
        ("bfloat", "bfloat", "bfloat", "bfloat"),
        ("float", "float", "half", "float"),
        ("float", "bfloat", "half", "float"),
    ],
)
def test_products(types: tuple[str, ...]) -> None:
    D, A, B, C = types
    source = f"""
kernel void k(device const {A}* a [[buffer(0)]], device const {B}* b [[buffer(1)]],
    device const {C}* c [[buffer(2)]], device {D}* out [[buffer(3)]]) {{
  simdgroup_matrix<{A}, 8, 8> x; simdgroup_matrix<{B}, 8, 8> y; simdgroup_matrix<{C}, 8, 8> z;
    simdgroup_matrix<{D}, 8, 8> d, e;
  simdgroup_load(x, a); simdgroup_load(y, b); simdgroup_load(z, c);
  simdgroup_multiply(d, x, y); simdgroup_multiply_accumulate(e, x, y, z);
  simdgroup_store(d, out); simdgroup_store(e, out + 64);
}}"""
    for scale in (1, 0):  # first with small integers, which every type represents exactly; then with fractions
        a, b, c = RNG(3).integers(-4, 5, (3, 8, 8)) if scale else RNG(4).normal(0, 1, (3, 8, 8))
        a, b, c = _stored(A, np.float32(a)), _stored(B, np.float32(b)), _stored(C, np.float32(c))
        out = _stored(D, np.zeros((2, 8, 8), np.float32))
        run(source, a, b, c, out, threads=32)
        exact = _value(A, a) @ _value(B, b)
        wanted = np.stack([exact, exact + _value(C, c)])
        size = np.abs(_value(A, a)) @ np.abs(_value(B, b)) + np.abs(_value(C, c))
        unit = {"float": 0, "half": 2.0**-11, "bfloat": 2.0**-8}[D]
        assert (np.abs(_value(D, out) - wanted) <= (1 - scale) * (unit * np.abs(wanted) + 9 * 2.0**-24 * size)).all()


def test_chains_of_products_and_operator() -> None:
    source = f"""
kernel void k(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
    device float* out [[buffer(2)]], {LANE}) {{
  simdgroup_float8x8 sum(0), x, y;
  for (int i = 0; i < 40; ++i) {{ simdgroup_load(x, a + 64 * i); simdgroup_load(y, b + 64 * i);
    simdgroup_multiply_accumulate(sum, x, y, sum); }}
  simdgroup_store(sum, out);
  simdgroup_float8x8 p, q; simdgroup_multiply(p, x, y); simdgroup_multiply(q, p, x);
    simdgroup_multiply_accumulate(p, q, p, q);
  simdgroup_store(p, out + 64);
  {{ simdgroup_float8x8 unused; simdgroup_multiply(unused, x, y); }}
  simdgroup_store(x * y, out + 128);
  float2 e = sum.thread_elements(); sum.thread_elements() = e * 2; simdgroup_store(sum, out + 192);
}}"""
    a, b = RNG(5).integers(-3, 4, (2, 40, 8, 8)).astype(np.float32)
    out = np.zeros((4, 8, 8), np.float32)
    run(source, a, b, out, threads=32)
    p = a[-1] @ b[-1]
    q = p @ a[-1]
    np.testing.assert_array_equal(out, [(a @ b).sum(0), q @ p + q, p, 2 * (a @ b).sum(0)])


def test_matrices_in_several_simdgroups() -> None:
    source = """
kernel void k(device const half* a [[buffer(0)]], device float* out [[buffer(1)]],
    uint s [[simdgroup_index_in_threadgroup]]) {
  simdgroup_half8x8 x; simdgroup_float8x8 d(1);
  simdgroup_load(x, a + 64 * s);
  for (uint i = 0; i <= s; ++i) simdgroup_multiply_accumulate(d, x, x, d);
  simdgroup_store(d, out + 64 * s);
}"""
    a = RNG(6).integers(-2, 3, (4, 8, 8)).astype(np.float16)
    out = np.zeros((4, 8, 8), np.float32)
    run(source, a, out, threads=128, group=128)
    square = a.astype(np.float32) @ a.astype(np.float32)
    np.testing.assert_array_equal(out, np.eye(8) + square * np.arange(1, 5).reshape(4, 1, 1))


def test_refused_matrices() -> None:
    assert "exists for 8x8 only" in refuse(
        "kernel void k(device float* a [[buffer(0)]]) { simdgroup_matrix<float, 16, 8> m; }"
    )
    assert "the matrix's element type" in refuse(
        "kernel void k(device float* a [[buffer(0)]]) { simdgroup_half8x8 m; simdgroup_load(m, a); }"
    )


ATOMIC_OPS = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@pytest.mark.parametrize("metal", ["int", "uint"])
@pytest.mark.parametrize("memory", ["device", "threadgroup"])
def test_atomics(metal: str, memory: str) -> None:
    dtype = {"int": np.int32, "uint": np.uint32}[metal]
    lines = "".join(
        f"atomic_fetch_{op}_explicit(&t[{i}], a[i], memory_order_relaxed);" for i, op in enumerate(ATOMIC_OPS)
    )
    init = f"for (int j = 0; j < 7; ++j) atomic_store_explicit(&t[j], {metal}(5), memory_order_relaxed);"
    local = (
        f"threadgroup atomic_{metal} t[7]; if (i == 0) {{ {init} }} threadgroup_barrier(mem_flags::mem_threadgroup);"
    )
    shared = f"device atomic<{metal}>* t = out; if (i == 0) {{ {init} }} threadgroup_barrier(mem_flags::mem_device);"
    source = f"""
kernel void k(device const {metal}* a [[buffer(0)]], device atomic_{metal}* out [[buffer(1)]],
    uint i [[thread_position_in_threadgroup]]) {{
  {local if memory == "threadgroup" else shared}
  {lines}
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  if (i < 7) atomic_store_explicit(&out[i], atomic_load_explicit(&t[i], memory_order_relaxed), memory_order_relaxed);
}}"""
    a = RNG(7).integers(0, 1 << 30, 256).astype(dtype)
    out = np.zeros(7, dtype)
    run(source, a, out, threads=256, group=256)
    with np.errstate(over="ignore"):
        wanted = [
            op.reduce(a, initial=dtype(5), dtype=dtype) if name != "sub" else dtype(5) - a.sum(dtype=dtype)
            for name, op in ATOMIC_OPS.items()
        ]
    np.testing.assert_array_equal(out, wanted)


def test_other_atomics() -> None:
    source = """
kernel void k(device atomic_float* f [[buffer(0)]], device atomic_uint* u [[buffer(1)]],
    device atomic_ulong* w [[buffer(2)]],
              volatile device atomic_int* v [[buffer(3)]], device uint* seen [[buffer(4)]],
    uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);
  uint mine = atomic_fetch_add_explicit(u, 1, memory_order_relaxed); seen[mine] = i + 1;
  atomic_max_explicit(w, ulong(i) << 40, memory_order_relaxed);
    atomic_min_explicit(w + 1, ulong(i + 3) << 40, memory_order_relaxed);
  int old = atomic_load_explicit(v, memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(v, &old, old + int(i), memory_order_relaxed, memory_order_relaxed)) {}
  if (i == 7) seen[100] = atomic_exchange_explicit(u + 1, 9u, memory_order_relaxed);
  threadgroup atomic_bool flag; if (i == 0) atomic_store_explicit(&flag, false, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 50) atomic_fetch_or_explicit(&flag, true, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 3) seen[101] = atomic_load_explicit(&flag, memory_order_relaxed);
}"""
    f, u, w, v = np.zeros(1, np.float32), np.uint32([0, 4]), np.uint64([0, 1 << 62]), np.zeros(1, np.int32)
    seen = np.zeros(102, np.uint32)
    run(source, f, u, w, v, seen, threads=100, group=100)
    assert [f[0], *u, *w, v[0]] == [50, 100, 9, 99 << 40, 3 << 40, 4950]
    np.testing.assert_array_equal(np.sort(seen[:100]), np.arange(1, 101))
    assert seen[100:].tolist() == [4, 1]


def test_atomic_types() -> None:
    compile_metal(
        'static_assert(sizeof(atomic_bool) == 4 && sizeof(atomic_ulong) == 8, "");'
        'static_assert(is_same_v<atomic_uint, atomic<uint>>, "");'
    )
    assert "exists for int, uint, bool, float and ulong" in refuse(
        "kernel void k(device atomic<short>* a [[buffer(0)]]) { a->value = 1; }"
    )
