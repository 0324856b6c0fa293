"""Tests the executor through the NumPy module: results of kernels in fast and in checked mode."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from softmetal import device
from softmetal.device import Buffer, FaultKind, KernelFault

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def build(source: str, checked: bool = False, **options: Any) -> device.Library:
    return device.compile(HEAD + source, checked=checked, file_name="test.metal", **options)


def test_simd_operations_under_divergence(checked: bool) -> None:
    kernel = build(
        """
        kernel void f(device const int* x, device int* y, uint i [[thread_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
          int total = 0;
          if (lane < 10) total = simd_sum(x[i]);
          else if (lane & 1) total = simd_max(x[i]);
          else total = simd_min(x[i]);
          int loops = 0;
          for (uint k = 0; k <= lane % 4; ++k) loops += simd_sum(1);
          y[2 * i] = total;
          y[2 * i + 1] = loops * 1000 + simd_sum(1);
        }""",
        checked,
    ).kernel("f")
    x = np.random.default_rng(1).integers(-100, 100, 96).astype(np.int32)
    y = np.zeros((96, 2), np.int32)
    kernel.launch(groups=1, group=96, buffers=[x, y])
    lane = np.arange(32)
    for s in range(3):
        part = x[32 * s : 32 * s + 32]
        odd = (lane >= 10) & (lane % 2 == 1)
        even = (lane >= 10) & (lane % 2 == 0)
        expected = np.where(lane < 10, part[:10].sum(), np.where(odd, part[odd].max(), part[even].min()))
        np.testing.assert_array_equal(y[32 * s : 32 * s + 32, 0], expected)
        # In round k, the lanes with lane % 4 >= k take part. After the loop, all lanes take part.
        rounds = np.array([sum(8 * (4 - k) for k in range(m + 1)) for m in range(4)])
        np.testing.assert_array_equal(y[32 * s : 32 * s + 32, 1], rounds[lane % 4] * 1000 + 32)


def test_positions_of_every_type_and_a_grid_that_does_not_divide(checked: bool) -> None:
    names = [
        ("uint3", "thread_position_in_grid"),
        ("ushort3", "thread_position_in_threadgroup"),
        ("uint3", "threadgroup_position_in_grid"),
        ("uint3", "threadgroups_per_grid"),
        ("ushort3", "threads_per_threadgroup"),
        ("uint3", "dispatch_threads_per_threadgroup"),
        ("uint3", "threads_per_grid"),
    ]
    scalars = [
        ("ushort", "thread_index_in_threadgroup"),
        ("uint", "thread_index_in_simdgroup"),
        ("ushort", "simdgroup_index_in_threadgroup"),
        ("uint", "simdgroups_per_threadgroup"),
        ("uint", "dispatch_simdgroups_per_threadgroup"),
        ("uint", "threads_per_simdgroup"),
        ("ushort", "thread_index_in_quadgroup"),
    ]
    parameters = ", ".join(f"{t} p{i} [[{n}]]" for i, (t, n) in enumerate([*names, *scalars]))
    stores = "".join(f"o[{3 * i + j}] = p{i}.{c};" for i in range(len(names)) for j, c in enumerate("xyz"))
    stores += "".join(f"o[{3 * len(names) + i}] = p{len(names) + i};" for i in range(len(scalars)))
    count = 3 * len(names) + len(scalars)
    kernel = build(
        f"""kernel void f(device uint* out, {parameters}) {{
          device uint* o = out + ((p0.z * 5 + p0.y) * 11 + p0.x) * {count}; {stores} }}""",
        checked,
    ).kernel("f")
    grid, group = (11, 5, 3), (4, 3, 2)
    out = np.full((3, 5, 11, count), 2**32 - 1, np.uint32)
    kernel.launch(threads=grid, group=group, buffers=[out])
    for z in range(3):
        for y in range(5):
            for x in range(11):
                at = (x, y, z)
                within = [p % g for p, g in zip(at, group, strict=True)]
                which = [p // g for p, g in zip(at, group, strict=True)]
                extent = [min(g, n - w * g) for g, n, w in zip(group, grid, which, strict=True)]
                index = within[0] + extent[0] * (within[1] + extent[1] * within[2])
                size = int(np.prod(extent))
                expected = [*at, *within, *which, 3, 2, 2, *extent, *group, *grid]
                expected += [index, index % 32, index // 32, -(-size // 32), 1, 32, index % 4]
                assert out[z, y, x].tolist() == expected


GEMM = """
template <typename T>
kernel void gemm(device const T* a, device const T* b, device float* c, constant uint& K,
                 uint2 tile [[threadgroup_position_in_grid]], uint2 tiles [[threadgroups_per_grid]]) {
  const uint N = tiles.x * 16;
  simdgroup_matrix<float, 8, 8> acc[2][2];
  for (int i = 0; i < 2; ++i) for (int j = 0; j < 2; ++j) acc[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0);
  for (uint k = 0; k < K; k += 8) {
    simdgroup_matrix<T, 8, 8> A[2], B[2];
    for (int i = 0; i < 2; ++i) simdgroup_load(A[i], a + (tile.y * 16 + 8 * i) * K + k, K);
    for (int j = 0; j < 2; ++j) simdgroup_load(B[j], b + k * N + tile.x * 16 + 8 * j, N);
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j) simdgroup_multiply_accumulate(acc[i][j], A[i], B[j], acc[i][j]);
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) simdgroup_store(acc[i][j], c + (tile.y * 16 + 8 * i) * N + tile.x * 16 + 8 * j, N);
}
template [[host_name("gemm_half")]] [[kernel]] decltype(gemm<half>) gemm<half>;
template [[host_name("gemm_float")]] [[kernel]] decltype(gemm<float>) gemm<float>;
"""


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_matrix_products_deferred_and_eager_give_the_same_bits(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    M, N, K = 32, 48, 200
    a, b = rng.standard_normal((M, K)).astype(dtype), rng.standard_normal((K, N)).astype(dtype)
    results = []
    for checked in (False, True):
        c = np.full((M, N), np.nan, np.float32)
        name = "gemm_half" if dtype == np.float16 else "gemm_float"
        counters = (
            build(GEMM, checked)
            .kernel(name)
            .launch(groups=(N // 16, M // 16), group=32, buffers=[a, b, c, struct.pack("I", K)])
        )
        assert counters.mmas == M * N * K // 512
        results.append(c)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = 2.0**-24 * K * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    assert (np.abs(results[0] - exact) <= bound).all()
    np.testing.assert_array_equal(results[0], results[1])


def test_matrix_looked_at_by_one_lane_between_products(checked: bool) -> None:
    kernel = build(
        """
        kernel void f(device const float* x, device float* y, uint lane [[thread_index_in_simdgroup]]) {
          simdgroup_float8x8 a, b, c(0), d;
          simdgroup_load(a, x, 8);
          simdgroup_load(b, x + 64, 8);
          for (int k = 0; k < 70; ++k) {
            simdgroup_multiply_accumulate(c, a, b, c);
            if (lane == 5 && k % 9 == 3) c.thread_elements()[1] *= 0.5;
            if (k % 16 == 7) simdgroup_multiply(d, a, c);
            simdgroup_multiply_accumulate(d, b, b, d);
          }
          simdgroup_store(c, y, 8);
          simdgroup_store(d, y + 64, 8);
        }""",
        checked,
    ).kernel("f")
    x = (np.random.default_rng(3).standard_normal((2, 8, 8)) * 0.2).astype(np.float32)
    y = np.zeros((2, 8, 8), np.float32)
    kernel.launch(groups=1, group=32, buffers=[x, y])
    a, b = x.astype(np.float64)
    c, d = np.zeros((8, 8)), None
    for k in range(70):
        c = c + a @ b
        if k % 9 == 3:
            c[2, 3] *= 0.5  # the second element of lane 5, which holds columns 2 and 3 of row (5 >> 1) & 3 = 2
        if k % 16 == 7:
            d = a @ c
        d = b @ b + (d if d is not None else np.nan)
    np.testing.assert_allclose(y[0], c, rtol=0, atol=1e-4)
    np.testing.assert_allclose(y[1], d, rtol=0, atol=1e-4)


def test_numbers_are_those_of_the_gpu(checked: bool) -> None:
    kernel = build(
        """
        kernel void f(device const float* x, device const half* h, device float* y, device half* z) {
          y[0] = x[0] * 1.5;             // fp32 subnormals are flushed
          y[1] = x[1] * x[2];
          y[2] = float(h[0]) * 16777216.0;  // half subnormals are not
          y[3] = x[3] * x[4] + x[5];     // contracted: one rounding
          float product = x[3] * x[4];
          y[4] = product + x[5];         // across statements: two
          z[0] = h[1] * h[2] + h[3] - h[3];  // half arithmetic rounds each time
          z[1] = 0.1h;
          y[5] = 0.1 + 0.2 == 0.3 ? 1 : 2;  // float literals
        }""",
        checked,
    ).kernel("f")
    x = np.array([1e-40, 1e-20, 1e-20, 1 + 2.0**-12, 1 + 2.0**-12, -1], np.float32)
    h = np.array([2.0**-24, 1.001, 1.001, 500], np.float16)
    y, z = np.full(6, 9, np.float32), np.zeros(2, np.float16)
    kernel.launch(groups=1, group=1, buffers=[x, h, y, z])
    exact = np.float64(x[3]) * np.float64(x[4]) + np.float64(x[5])
    literal = np.float32(np.float32(0.1) + np.float32(0.2)) == np.float32(0.3)
    assert y.tolist() == [0, 0, 1, np.float32(exact), np.float32(x[3] * x[4]) + x[5], 1 if literal else 2]
    fused = np.float16(np.float64(h[1]) * np.float64(h[2]) + np.float64(h[3]))
    assert z[0] == fused - h[3]
    assert z[1] == np.float16(0.1)


def test_counters() -> None:
    source = """
    kernel void f(device const float* x, device float* y, device atomic_uint* n,
                  uint g [[threadgroup_position_in_grid]], uint i [[thread_index_in_threadgroup]]) {
      threadgroup float s[64];
      s[i] = x[i];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float v = s[63 - i];
      simdgroup_barrier(mem_flags::mem_none);
      y[g * 64 + i] = simd_broadcast(v, 0);
      if (i == 0) atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
    }"""
    x, y, n = np.arange(64, dtype=np.float32), np.zeros(192, np.float32), np.zeros(1, np.uint32)
    fast = build(source).kernel("f").launch(groups=3, group=64, buffers=[x, y, n])
    seen = build(source, True).kernel("f").launch(groups=3, group=64, buffers=[x, y, n])
    for c in (fast, seen):
        assert (c.threads, c.threadgroups, c.threadgroup_barriers, c.simdgroup_barriers) == (192, 3, 3, 6)
        assert (c.simd_operations, c.mmas, c.atomics) == (6, 0, 3)
    assert fast.device_bytes_read is None
    assert fast.buffers is None
    assert seen.buffers is not None
    assert seen.buffers[0] == {"bytes_read": 768, "bytes_written": 0, "distinct_read": 256, "distinct_written": 0}
    assert seen.buffers[1] == {"bytes_read": 0, "bytes_written": 768, "distinct_read": 0, "distinct_written": 768}
    assert seen.buffers[2]["distinct_written"] == 4
    assert (seen.threadgroup_bytes_read, seen.threadgroup_bytes_written) == (768, 768)
    assert (seen.distinct_bytes_read, seen.distinct_bytes_written) == (256, 772)
    assert n[0] == 6


def test_interleaving_follows_the_seed() -> None:
    kernel = build(
        """
        kernel void f(device atomic_uint* n, device uint* order, uint i [[thread_position_in_grid]]) {
          uint place = atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
          order[place] = i;
        }""",
        True,
    ).kernel("f")

    def order(seed: int) -> list[int]:
        n, out = np.zeros(1, np.uint32), np.zeros(512, np.uint32)
        kernel.launch(groups=8, group=64, buffers=[n, out], seed=seed)
        assert sorted(out.tolist()) == list(range(512))
        return out.tolist()

    assert order(7) == order(7)
    assert order(7) != order(8)
    # The seed determines how many threadgroups run at the same time, one to four.
    changes = [int((np.diff(np.array(order(seed)) // 64) != 0).sum()) for seed in range(20)]
    assert max(changes) > 100 and min(changes) == 7


def test_progress_that_metal_does_not_promise() -> None:
    """Two kernels end only for some seeds: a barrier across the grid, and a lock between the lanes of a simdgroup."""
    across = """
    kernel void f(device atomic_uint* n, uint i [[thread_index_in_threadgroup]]) {
      if (i == 0) atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
      if (i == 0) while (atomic_load_explicit(n, memory_order_relaxed) < 2) {}
    }"""
    lock = """
    kernel void f(device atomic_uint* n, uint i [[thread_index_in_threadgroup]]) {
      if (i == 0) atomic_store_explicit(n + 1, 1u, memory_order_relaxed);
      if (i == 1) while (atomic_load_explicit(n + 1, memory_order_relaxed) == 0) {}
      if (i == 2) while (atomic_load_explicit(n + 2, memory_order_relaxed) == 0) {}
      if (i == 3) atomic_store_explicit(n + 2, 1u, memory_order_relaxed);
    }"""
    for source, groups in ((across, 2), (lock, 1)):
        kernel = build(source, True).kernel("f")
        kinds = set()
        for seed in range(24):
            n = np.zeros(4, np.uint32)
            kernel.launch(groups=groups, group=32, buffers=[n], seed=seed, watchdog=0.02, raise_faults=False)
            kinds.add(tuple(f.kind for f in kernel.last_faults))
        assert kinds == {(), (FaultKind.ENDLESS,)}


def test_threads_are_interleaved_between_their_accesses() -> None:
    kernel = build(
        """
        kernel void f(device atomic_uint* n, device uint* y, uint i [[thread_position_in_grid]]) {
          y[2 * i] = atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
          y[2 * i + 1] = atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
        }""",
        True,
    ).kernel("f")
    n, y = np.zeros(1, np.uint32), np.zeros((64, 2), np.uint32)
    kernel.launch(groups=1, group=64, buffers=[n, y], seed=3)
    assert (y[:, 1] != y[:, 0] + 1).sum() > 16


def test_os_threads_give_the_same_result() -> None:
    source = """
    kernel void f(device const float* x, device float* y, uint g [[threadgroup_position_in_grid]],
                  uint i [[thread_index_in_threadgroup]]) {
      threadgroup float s[256];
      s[i] = x[g * 256 + i];
      for (uint k = 128; k > 0; k /= 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i < k) s[i] += s[i + k];
      }
      if (i == 0) y[g] = s[0];
    }"""
    x = np.random.default_rng(5).standard_normal((200, 256)).astype(np.float32)
    results = []
    for threads in (1, 3):
        y = np.zeros(200, np.float32)
        counters = build(source).kernel("f").launch(groups=200, group=256, buffers=[x, y], os_threads=threads)
        assert counters.threadgroup_barriers == 1600
        results.append(y)
    tree = x.copy()
    for k in (128, 64, 32, 16, 8, 4, 2, 1):
        tree = tree[:, :k] + tree[:, k : 2 * k]
    np.testing.assert_array_equal(results[0], tree[:, 0])
    np.testing.assert_array_equal(results[1], tree[:, 0])


def test_perturbed_functions_stay_within_reach() -> None:
    source = "kernel void f(device float* x, uint i [[thread_position_in_grid]]) { x[i] = precise::exp(x[i]); }"
    start = np.linspace(-5, 5, 256, dtype=np.float32)
    results = {}
    for seed in (0, 1, 2):
        x = start.copy()
        build(source).kernel("f").launch(threads=256, group=64, buffers=[x], perturb_seed=seed)
        again = start.copy()
        build(source).kernel("f").launch(threads=256, group=64, buffers=[again], perturb_seed=seed)
        np.testing.assert_array_equal(x, again)
        exact = np.exp(start.astype(np.float64))
        assert (np.abs(x - exact) <= 5 * np.spacing(exact.astype(np.float32))).all()  # Metal's 4 ulp, and the host's 1
        results[seed] = x
    assert (results[0] != results[1]).any()
    assert (results[1] != results[2]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 1, "group": 2048}, "threadgroup of 2048 threads, the kernel takes 1024"),
        ({"groups": 0, "group": 32}, "a grid or threadgroup of no threads"),
        ({"groups": 1, "group": 32, "threadgroup_memory": {0: 32768}}, "33792 bytes of threadgroup memory"),
        ({"groups": 1, "group": 32, "buffers": [np.zeros(4, np.float32), None]}, "buffer 1 is not bound"),
        ({"groups": 1, "group": 32, "buffers": [np.zeros(4, np.float32), b"ab"]}, "buffer 1 is shorter"),
    ],
)
def test_launches_that_metal_refuses(options: dict[str, Any], message: str) -> None:
    source = """kernel void f(device float* x, constant uint& n, threadgroup float* t [[threadgroup(0)]]) {
      threadgroup float s[256]; s[0] = n; x[0] = s[0]; }"""
    with pytest.raises(KernelFault, match=message) as caught:
        build(source).kernel("f").launch(**{"buffers": [np.zeros(4, np.float32), struct.pack("I", 1)], **options})
    assert caught.value.faults[0].kind == FaultKind.RESOURCE


def test_overlapping_buffers_are_one_memory() -> None:
    source = """
    kernel void f(device const float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i] * 2; }"""
    memory = np.arange(64, dtype=np.float32)
    build(source, True).kernel("f").launch(threads=64, group=32, buffers=[memory, memory])
    np.testing.assert_array_equal(memory, 2 * np.arange(64))
    with pytest.raises(KernelFault, match="race"):
        build(source, True).kernel("f").launch(threads=60, group=32, buffers=[memory, (memory, 16)])


def test_what_is_initialised_outlives_a_launch() -> None:
    source = """
    kernel void half_of(device float* t, uint i [[thread_position_in_grid]]) { if (i < 32) t[i] = i; }
    kernel void rest(device float* t, uint i [[thread_position_in_grid]]) { if (i >= 32) t[i] = i; }
    kernel void sum(device const float* t, device float* y, uint i [[thread_position_in_grid]]) { y[i] = t[i]; }
    """
    library = build(source, True)
    t, y = Buffer.empty(64, np.float32), np.zeros(64, np.float32)
    library.kernel("half_of").launch(threads=64, group=32, buffers=[t])
    with pytest.raises(KernelFault, match=r"never written: buffer 0 \+ (128|1[3-9]\d|2\d\d) \(t, 256 bytes\)"):
        library.kernel("sum").launch(threads=64, group=32, buffers=[t, y])
    library.kernel("rest").launch(threads=64, group=32, buffers=[t])
    library.kernel("sum").launch(threads=64, group=32, buffers=[t, y])
    np.testing.assert_array_equal(y, np.arange(64))
