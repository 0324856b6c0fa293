"""Tests the fusion of multiply-adds within an expression, on scalars and vectors, and in the varied modes."""

from __future__ import annotations

import numpy as np
import pytest

from softmetal import device
from softmetal.msl.contraction import fused_products
from softmetal.msl.fast_math import SAFE, varied
from softmetal.msl.tokens import significant, tokenize

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("y = a * b + c;", "y = [a] * [b] + c;"),
        ("c.zw -= a.xy * b[i].zw;", "c.zw -= [a.xy] * [b[i].zw];"),
        ("y = d - a / e * b + f;", "y = d - [a / e] * [b] + f;"),
        ("y = (a * b) + f(c) * (d);", "y = ([a] * [b]) + [f(c)] * [(d)];"),
        ("y = static_cast<float4>(x) * vec<T, 4>(z) + w;", "y = [static_cast<float4>(x)] * [vec<T, 4>(z)] + w;"),
        ("if (i < n && j > (b) * c) *p++ = -a * b + c;", "if (i < n && j > (b) * c) *p++ = [-a] * [b] + c;"),
        ("y = Sqrt{}(a) * Half<4>{2}(b) + c;", "y = [Sqrt{}(a)] * [Half<4>{2}(b)] + c;"),
        ("struct A { int x; } *p; void f() const {} y = a * b + c;", "struct A { int x; } *p; void f() const {} y = [a] * [b] + c;"),
        ("y = a * b; y += c; y += a * b / d; z = f(a * b) + c;", None),
        ("float4* p = q + 1; float4 * r = p - 1; y = (a * b) << c + d;", None),
        ("y = c ? a * b : d + e; y = f(a * b) - (c + d);", None),
        ("y = -(a * b) + c - +(d * e) + -f(a * b);", "y = -([a] * [b]) + c - +([d] * [e]) + -f(a * b);"),
        ("{\n#pragma clang fp contract(off)\ny = a * b + c; }\n y = a * b + c;",
         "{\n#pragma clang fp contract(off)\ny = a * b + c; }\n y = [a] * [b] + c;"),
    ],
)  # fmt: skip
def test_products_that_a_sum_takes(source: str, expected: str | None) -> None:
    wanted = source if expected is None else expected
    tokens = tokenize(source)
    for product in fused_products(tokens, significant(tokens)):
        for first, last in (product.left, product.right):
            first.text = "[" + first.text
            last.text += "]"
    assert "".join(t.text for t in tokens) == wanted


# x is 1 + n / 4096. If n is odd and the square is below 2, the square needs 25 bits, so rounding it to fp32 changes it.
VECTORS = f"""{HEAD}
kernel void f(device const float4* a [[buffer(0)]], device float4* y [[buffer(1)]], constant packed_float4& p,
              device const half4* h, device half4* z) {{
  const float4 x = *a, one = 1;
  y[0] = x * x - one;
  y[1] = 1 - x * x;
  y[2] = one; y[2].zw -= x.zw * x.zw;
  y[3] = -0.25 * x + (x * p);
  y[4] = x * x - x * x;
  const float4 square = x * x;
  y[5] = square - one;
  y[6] = one; y[6] += x * x.x;
  {{
#pragma METAL fp contract(off)
    y[7] = x * x - one;
  }}
  y[8] = float4x4(1) * x + one;
  y[9] = -(x * x) + one;
  z[0] = h[0] * h[0] + h[0];
  for (uint i = 0; i < 4; ++i) z[1][i] = h[0][i] * h[0][i] + h[0][i];
}}"""


def test_vectors_are_contracted_within_one_expression(checked: bool) -> None:
    x = (1 + np.array([1, 77, 511, 1333]) / 4096).astype(np.float32)
    half = np.array([1.001, 1.5, 7.7, 0.1], np.float16)
    y, z = np.zeros((10, 4), np.float32), np.zeros((2, 4), np.float16)
    kernel = device.compile(VECTORS, checked=checked).kernel("f")
    kernel.launch(threads=1, group=1, buffers=[x, y, x.tobytes(), half, z])
    square, rounded = x.astype(np.float64) ** 2, (x * x).astype(np.float64)
    exact = (square - 1).astype(np.float32)
    assert (exact != rounded - 1).all()
    np.testing.assert_array_equal(y[0], exact)
    np.testing.assert_array_equal(y[1], -exact)
    np.testing.assert_array_equal(y[2], [1, 1, *-exact[2:]])
    np.testing.assert_array_equal(y[3], (-0.25 * x.astype(np.float64) + rounded).astype(np.float32))
    np.testing.assert_array_equal(y[4], (square - rounded).astype(np.float32))
    np.testing.assert_array_equal(y[5], rounded - 1)
    np.testing.assert_array_equal(y[6], (1 + x.astype(np.float64) * float(x[0])).astype(np.float32))
    np.testing.assert_array_equal(y[7], rounded - 1)
    np.testing.assert_array_equal(y[8], x + 1)
    np.testing.assert_array_equal(y[9], -exact)
    np.testing.assert_array_equal(z[0], z[1])


CHOICES = f"""{HEAD}
kernel void f(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {{
  const float product = x[i] * x[i];
  y[i] = simd_sum(x[i]);
  y[512 + i] = x[i] * x[i] - 1.0f;
  y[1024 + i] = product - 1.0f;
}}"""


def test_varied_modes_make_other_choices() -> None:
    x = (1 + np.random.default_rng(0).integers(0, 4096, 512) / 4096).astype(np.float32)
    x[::3] *= np.float32(1e-4)
    results = {}
    for mode in (SAFE, *(varied(seed) for seed in (0, 4, 5))):
        y = np.zeros((3, 512), np.float32)
        device.compile(CHOICES, math=mode).kernel("f").launch(threads=512, group=64, buffers=[x, y])
        np.testing.assert_allclose(y[0], np.repeat(x.astype(np.float64).reshape(-1, 32).sum(1), 32), rtol=32 * 2.0**-24)
        np.testing.assert_allclose(y[1:], np.tile(x.astype(np.float64) ** 2 - 1, (2, 1)), atol=2.0**-22)
        results[mode] = y
    exact = (x.astype(np.float64) ** 2 - 1).astype(np.float32)
    for row, contracts in ((1, ("on", "fast")), (2, ("fast",))):
        for mode, y in results.items():
            contract = "on" if mode == SAFE else mode.split("-")[1]
            assert (y[row] == exact).all() == (contract in contracts), (mode, row)
    assert len({y[0].tobytes() for y in results.values()}) == 3
    assert {varied(seed) for seed in range(8)} == {varied(seed) for seed in range(16)} > set(results) - {SAFE}
