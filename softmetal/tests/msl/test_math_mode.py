"""Tests that relaxed and fast mode give other results than safe mode, and that `#pragma METAL fp` changes the mode."""

from __future__ import annotations

import numpy as np
import pytest

from softmetal import device

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def run(
    body: str,
    math: str,
    *,
    x: np.ndarray,
    checked: bool = False,
    before: str = "",
    functions: str = "precise",
    perturb_seed: int = 0,
) -> np.ndarray:
    kind = {np.dtype(np.float32): "float", np.dtype(np.float16): "half"}[x.dtype]
    source = f"""{HEAD}{before}
    kernel void f(device const {kind}* x [[buffer(0)]], device {kind}* y [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {{
{body}
}}"""
    y = np.zeros_like(x)
    kernel = device.compile(source, checked=checked, math=math, functions=functions, file_name="math.metal").kernel("f")
    kernel.launch(threads=len(x), group=min(len(x), 256), buffers=[x, y], seed=1, perturb_seed=perturb_seed)
    return y


def test_half_subnormals_are_flushed_unless_safe(checked: bool) -> None:
    x = np.array([2.0**-15, 2.0**-24, 2.0**-14, -(2.0**-20), 1.0], np.float16)
    flushed = np.where(np.abs(x) < 2.0**-14, np.float16(0), x)
    body = "y[i] = x[i] * 1024.0h;"
    np.testing.assert_array_equal(run(body, "safe", x=x, checked=checked), x * np.float16(1024))
    for math in ("relaxed", "fast"):
        np.testing.assert_array_equal(run(body, math, x=x, checked=checked), flushed * np.float16(1024))
    # In fast mode, three values are flushed: y[0] is a result, y[1] a conversion to float, y[2] a conversion from
    # float. y[3] is a copy and keeps its value.
    body = "y[i] = i == 0 ? x[4] * x[2] * 0.5h : i == 1 ? half(float(x[1]) * 1024.0f) : i == 2 ? half(float(x[4]) * 2e-5f) : x[i];"
    safe = [2.0**-15, 2.0**-14, np.float16(2e-5), -(2.0**-20), 1]
    np.testing.assert_array_equal(run(body, "safe", x=x, checked=checked), np.array(safe, np.float16))
    fast = np.array([0, 0, 0, -(2.0**-20), 1], np.float16)
    np.testing.assert_array_equal(run(body, "fast", x=x, checked=checked), fast)


def test_fast_mode_has_no_nan() -> None:
    x = np.array([np.nan, 1, np.inf], np.float32)
    body = "y[i] = isnan(x[i]) ? 1 : isinf(x[i]) ? 2 : 3;"
    np.testing.assert_array_equal(run(body, "safe", x=x), [1, 3, 2])
    np.testing.assert_array_equal(run(body, "relaxed", x=x), [1, 3, 2])
    np.testing.assert_array_equal(run(body, "fast", x=x), [3, 3, 3])


LARGE = np.full(4, 2.0**24, np.float32)
REASSOCIATED = "y[i] = (x[i] + float(i + 1)) - x[i];"


def test_fast_mode_reassociates() -> None:
    np.testing.assert_array_equal(run(REASSOCIATED, "safe", x=LARGE), [0, 2, 4, 4])
    for math in ("relaxed", "fast"):
        np.testing.assert_array_equal(run(REASSOCIATED, math, x=LARGE), [1, 2, 3, 4])


def test_math_mode_pragma() -> None:
    safe, fast = ("#pragma METAL fp math_mode(safe)\n", "#pragma METAL fp math_mode(fast)\n")
    np.testing.assert_array_equal(run(REASSOCIATED, "fast", x=LARGE, before=safe), [0, 2, 4, 4])
    np.testing.assert_array_equal(run(REASSOCIATED, "safe", x=LARGE, before=fast), [1, 2, 3, 4])
    np.testing.assert_array_equal(run(safe + REASSOCIATED, "fast", x=LARGE), [0, 2, 4, 4])


def test_contract_pragma() -> None:
    x = np.array([1 + 2.0**-12], np.float32)
    body = "{ y[i] = x[i] * x[i] - 1.0f; }"
    square = float(x[0]) ** 2
    assert run(body, "safe", x=x)[0] == np.float32(square - 1)
    off = "#pragma METAL fp contract(off)\n"
    for rounded in (run(off + body[1:-1], "safe", x=x), run(body, "safe", x=x, before=off)):
        assert rounded[0] == np.float32(np.float32(square) - np.float32(1)) != np.float32(square - 1)
    with pytest.raises(device.CompileError, match=r"math\.metal:3: error: #pragma METAL fp: expected one of contract"):
        run(body, "safe", x=x, before="#pragma METAL fp contracts(on)\n")


@pytest.mark.parametrize("name", ["exp", "log"])
def test_fast_functions_are_less_exact(name: str) -> None:
    x = np.linspace(30, 80, 512, dtype=np.float32) if name == "exp" else np.linspace(0.99, 1.01, 512, dtype=np.float32)
    wanted = getattr(np, name)(x.astype(np.float64))
    worst = {}
    for functions in ("precise", "fast"):
        y = run(f"y[i] = {name}(x[i]);", "safe", x=x, functions=functions, perturb_seed=3)
        worst[functions] = np.abs(y - wanted) / np.spacing(np.abs(wanted).astype(np.float32))
    assert worst["precise"].max() <= 4
    if name == "exp":
        assert worst["fast"].max() > 20 and (worst["fast"] <= 3 + np.floor(2 * x)).all()
    else:  # For the fast logarithm, Metal limits only the absolute error, which can exceed the result near x = 1.
        error = worst["fast"] * np.spacing(np.abs(wanted).astype(np.float32))
        assert 2**-22 < error.max() < 2**-21


def test_fast_max_and_min_promise_nothing_for_nan(checked: bool) -> None:
    x = np.array([np.nan, np.nan, 1, 5], np.float32)
    body = "y[i] = i == 0 ? max(x[i], 3.0f) : i == 1 ? fmin(x[i], 3.0f) : clamp(x[i], 2.0f, 4.0f);"
    np.testing.assert_array_equal(run(body, "safe", x=x, checked=checked), [3, 3, 2, 4])
    fast = run(body, "safe", x=x, checked=checked, functions="fast")
    np.testing.assert_array_equal(fast, [np.nan, np.nan, 2, 4])


def test_named_functions_do_not_follow_the_library() -> None:
    x = np.array([np.nan, np.nan], np.float32)
    body = "y[i] = i == 0 ? precise::max(x[i], 3.0f) : fast::max(x[i], 3.0f);"
    for functions in ("precise", "fast"):
        np.testing.assert_array_equal(run(body, "safe", x=x, functions=functions), [3, np.nan])
