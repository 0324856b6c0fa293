"""Compares Metal 4's matmul2d and cooperative tensors with NumPy in fp64. A seed determines the layout of elements over
threads and the order of sums.
"""

from __future__ import annotations

import numpy as np
import pytest
from msl_kernels import CompileError
from tensor_kernels import HEADER, REGISTERS, SHAPES, TENSORS, TYPES, bound, library, operand

from softmetal import device
from softmetal.device import Buffer, FaultKind, KernelFault

# Seeds of launches. 0 selects the simplest layout and order, and 1 to 11 include every order of sums.
SEEDS = range(12)


@pytest.mark.parametrize("element", TYPES)
def test_registers(element: str, checked: bool) -> None:
    rng = np.random.default_rng(1)
    seen: dict[str, set[bytes]] = {name: set() for name in SHAPES}
    for name, (m, n, k) in SHAPES.items():
        stored_a, a = operand(rng, (k, m) if name in ("tn", "tt") else (m, k), element)
        stored_b, b = operand(rng, (n, k) if name in ("nt", "tt", "odd") else (k, n), element)
        a, b = (a.T if name in ("tn", "tt") else a), (b.T if name in ("nt", "tt", "odd") else b)
        c = Buffer.empty(m * n, np.float32)
        for seed in SEEDS:
            kernel = library(REGISTERS, element, checked).kernel(name)
            kernel.launch(groups=1, group=32, buffers=[stored_a, stored_b, c], perturb_seed=seed)
            assert (np.abs(c.array.reshape(m, n) - (a @ b + 1)) <= bound(a, b, k)).all(), (name, seed)
            seen[name].add(c.array.tobytes())
    assert all(len(results) > 1 for results in seen.values())  # different seeds add in different orders


@pytest.mark.parametrize("element", ["half", "bfloat"])
def test_tensors(element: str, checked: bool) -> None:
    rng = np.random.default_rng(2)
    for m, n, k in ((64, 32, 32), (70, 45, 83), (1, 1, 1)):
        stored_a, a = operand(rng, (m, k), element)
        stored_b, b = operand(rng, (n, k), element)
        for seed in (0, 3, 5):
            groups, c = (-(-n // 32), -(-m // 64), 1), np.full(m * n, np.nan, np.float32)
            buffers = [stored_a, stored_b, c, np.array([m, n, k, 0], np.int32)]
            library(TENSORS, element, checked).kernel("f").launch(
                groups=groups, group=128, buffers=buffers, perturb_seed=seed
            )
            assert (np.abs(c.reshape(m, n) - a @ b.T) <= bound(a, b.T, k)).all(), (m, n, k, seed)
    m, n, k = 77, 41, 50
    (stored_a, a), (stored_b, b) = operand(rng, (m, k), element), operand(rng, (n, k), element)
    c = np.full(m * n, np.nan, np.float32)
    shape = np.array([m, n, k, 0], np.int32)
    library(TENSORS, element, checked).kernel("memory").launch(
        groups=1, group=32, buffers=[stored_a, stored_b, c, shape]
    )
    assert (np.abs(c.reshape(m, n) - a @ b.T) <= bound(a, b.T, k)).all()


def test_relaxed_precision_rounds_float_operands() -> None:
    source = REGISTERS.replace("TA, TB, false", "TA, TB, true")
    rng = np.random.default_rng(3)
    (a, wide_a), (b, wide_b) = operand(rng, (16, 16), "float"), operand(rng, (16, 32), "float")
    errors = []
    for seed in range(12):
        c = Buffer.empty(16 * 32, np.float32)
        library(source, "float", False).kernel("nn").launch(groups=1, group=32, buffers=[a, b, c], perturb_seed=seed)
        scale = np.abs(wide_a) @ np.abs(wide_b) + 1
        errors.append((np.abs(c.array.reshape(16, 32) - (wide_a @ wide_b + 1)) / scale).max())
    assert max(errors) <= 2.0**-10 and max(errors) > 2.0**-15 and min(errors) < 2.0**-20


def test_layout_of_one_simdgroup() -> None:
    """A seed must not change the layouts that kernels rely on.

    MLX's kernels rely on four neighboring columns (mlx-metal 0.32.4, steel/gemm/nax.h). For fp32 without relaxed
    precision, docs/device.md names the programs that use pairs of columns on an M5.
    """
    source = """
    template <typename C> void places(thread C& c, device int* out, uint lane) {
      for (ushort i = 0; i < c.get_capacity(); ++i) {
        const auto at = c.get_multidimensional_index(i);
        out[lane * 16 + i] = at[1] * 100 + at[0];
      }
    }
    kernel void f(device int* right, device int* transposed, device int* sum, device int* other,
                  device int* strict_left, device int* strict_right, device int* strict_sum, device int* relaxed_sum,
                  uint lane [[thread_index_in_simdgroup]]) {
      constexpr auto desc = matmul2d_descriptor(16, 32, 16);
      constexpr auto turned = matmul2d_descriptor(16, 32, 16, false, true);
      constexpr auto uneven = matmul2d_descriptor(24, 32, 16);
      matmul2d<desc, execution_simdgroup> op;
      auto a = op.get_left_input_cooperative_tensor<half, half, float>();
      auto b = op.get_right_input_cooperative_tensor<half, half, float>();
      auto c = op.get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
      auto t = matmul2d<turned, execution_simdgroup>().get_right_input_cooperative_tensor<half, half, float>();
      places(b, right, lane);
      places(t, transposed, lane);
      places(c, sum, lane);
      auto unknown = matmul2d<uneven, execution_simdgroup>().get_left_input_cooperative_tensor<half, half, float>();
      places(unknown, other, lane);
      auto fa = op.get_left_input_cooperative_tensor<float, float, float>();
      auto fb = op.get_right_input_cooperative_tensor<float, float, float>();
      auto fc = op.get_destination_cooperative_tensor<decltype(fa), decltype(fb), float>();
      places(fa, strict_left, lane);
      places(fb, strict_right, lane);
      places(fc, strict_sum, lane);
      constexpr auto relaxed = matmul2d_descriptor(16, 32, 16, false, false, true);
      matmul2d<relaxed, execution_simdgroup> rounded;
      auto ra = rounded.get_left_input_cooperative_tensor<float, float, float>();
      auto rb = rounded.get_right_input_cooperative_tensor<float, float, float>();
      auto rc = rounded.get_destination_cooperative_tensor<decltype(ra), decltype(rb), float>();
      places(rc, relaxed_sum, lane);
    }
    """
    lane, i = np.arange(32)[:, None], np.arange(16)[None, :]
    row = (((lane >> 2) & 4) | ((lane >> 1) & 3)) + (i >> 2) % 2 * 8
    column = (((lane >> 2) & 2) | (lane & 1)) * 4 + i % 4
    strict_row, pair = ((lane >> 2) & 4) | ((lane >> 1) & 3), (((lane >> 2) & 2) | (lane & 1)) * 2
    others = []
    for seed in SEEDS:
        found = [np.zeros((32, 16), np.int32) for _ in range(8)]
        library(source, "half", False).kernel("f").launch(groups=1, group=32, buffers=found, perturb_seed=seed)
        np.testing.assert_array_equal(found[0], row * 100 + column + i // 8 * 16)
        np.testing.assert_array_equal(found[1], (row + i // 8 * 16) * 100 + column)
        np.testing.assert_array_equal(found[2], row * 100 + column + i // 8 * 16)
        others.append(found[3])
        strict_left = (strict_row + 8 * (i >> 2)) * 100 + pair + (i & 1) + 8 * ((i >> 1) & 1)
        np.testing.assert_array_equal(found[4][:, :8], strict_left[:, :8])
        strict = (strict_row + 8 * (i >> 3)) * 100 + pair + (i & 1) + 8 * ((i >> 1) & 1) + 16 * ((i >> 2) & 1)
        np.testing.assert_array_equal(found[5], strict)
        np.testing.assert_array_equal(found[6], strict)
        np.testing.assert_array_equal(found[7], found[2])
    # 24 x 16 has two blocks, of which a lane holds 16 elements. In every layout, each place occurs exactly once.
    places = np.add.outer(np.arange(32) * 100, np.arange(16)).ravel()
    assert all((np.sort(other.ravel()) == places).all() for other in others)
    assert len({other.tobytes() for other in others}) >= len(SEEDS) - 2
    assert len({frozenset(other[0].tolist()) for other in others}) > 6, "seeds exchange lanes"
    assert len({tuple(np.argsort(other[0, :8])) for other in others}) > 3, "seeds exchange the elements of a lane"
    assert len({tuple(other[0] // 1600) for other in others}) == 2, "seeds exchange blocks"


REFUSED = {
    "integers": (
        "auto a = op.get_left_input_cooperative_tensor<int, int, int>(); a[0] = 1;",
        "expected operands of half, bfloat or float",
    ),
    "half with bfloat in memory": (
        "tensor<device half, dextents<int, 2>, tensor_inline> a(x, dextents<int, 2>(16, 16)); "
        "tensor<device bfloat, dextents<int, 2>, tensor_inline> b((device bfloat*)x, dextents<int, 2>(32, 16)); "
        "auto c = op.get_destination_cooperative_tensor<decltype(a), decltype(b), float>(); op.run(a, b, c);",
        "expected operands of one type, unless both are in registers",
    ),
    "registers of several simdgroups": (
        "auto a = four.get_left_input_cooperative_tensor<half, half, float>(); a[0] = 1.0h;",
        "operands in registers need execution_simdgroup",
    ),
    "handle": (
        "tensor<device half, dextents<int, 2>> a(x, dextents<int, 2>(1, 1));",
        "the software device has only tensor_inline",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_text(name: str) -> None:
    body, message = REFUSED[name]
    source = f"""
    kernel void f(device half* x) {{
      constexpr auto desc = matmul2d_descriptor(16, 32, 16);
      matmul2d<desc, execution_simdgroup> op;
      matmul2d<desc, execution_simdgroups<4>> four;
      {body}
    }}
    """
    with pytest.raises(CompileError, match=message):
        library(source, "half", False)


def test_language_version() -> None:
    with pytest.raises(CompileError, match=r"expected Metal language version 4\.0 or later"):
        device.compile(f"{HEADER}kernel void f() {{}}\n", version=320)


def test_a_product_that_one_lane_does_not_reach_is_a_fault() -> None:
    source = REGISTERS.replace("  op.run(left", "  if (lane != 3) op.run(left").replace(
        "void product(device const T* a", "void product(uint lane, device const T* a"
    )
    source = source.replace(", device float* c) { product<A, __VA_ARGS__>(", """, device float* c,
      uint lane [[thread_index_in_simdgroup]]) { product<A, __VA_ARGS__>(lane, """.replace("\n", "\\\n"))  # fmt: skip
    buffers = [np.zeros(256, np.float16), np.zeros(512, np.float16), np.zeros(512, np.float32)]
    with pytest.raises(KernelFault, match="only some threads of the simdgroup") as fault:
        library(source, "half", True).kernel("nn").launch(groups=1, group=32, buffers=buffers)
    assert fault.value.faults[0].kind is FaultKind.SIMD
