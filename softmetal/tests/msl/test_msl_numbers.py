"""Tests conversions and rounding of half, bfloat and float, exact functions, and limits."""

import numpy as np
import pytest
import torch
from msl_kernels import INTEGERS, compile_metal, evaluate, refuse, run, type_name

RNG = np.random.default_rng
ALL_16 = np.arange(1 << 16, dtype=np.uint16)
ALL_HALF = ALL_16.view(np.float16)


def _same(got: np.ndarray, wanted: np.ndarray) -> None:
    """Asserts equal bits. Any two NaNs are equal."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    number = ~np.isnan(wanted)
    bits = {2: np.uint16, 4: np.uint32}[got.itemsize]
    np.testing.assert_array_equal(got[number].view(bits), wanted[number].view(bits))


def _floats() -> np.ndarray:
    """Returns floats: random bits of every exponent, ties for half and bfloat, the ties' neighbors, and special
    values.
    """
    bits = RNG(1).integers(0, 1 << 32, 20000, np.uint64).astype(np.uint32)
    upper = RNG(2).integers(0, 1 << 16, 4000).astype(np.uint32) << 16
    ties = np.concatenate([upper + d for d in (0x8000, 0x7FFF, 0x8001)])
    middle = (ALL_HALF[:0x7BFF].astype(np.float64) + ALL_HALF[1:0x7C00].astype(np.float64)) / 2
    halves = np.concatenate(
        [f(middle.astype(np.float32)) for f in (lambda x: x, lambda x: np.nextafter(x, 0), lambda x: -x)]
    )
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 65519.99, 65520, 3.4e38, 1e-45, 1e-40])
    return np.concatenate([bits.view(np.float32), ties.view(np.float32), halves.astype(np.float32), special])


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def test_half_to_float_for_all_patterns() -> None:
    for (h,), got in evaluate({"f": "FLOAT(a)".replace("FLOAT", "float")}, [ALL_HALF], "float", widths=[1])["f"]:
        _same(got, h.astype(np.float32))
    for (h,), got in evaluate({"v": "float4(a)"}, [ALL_HALF], "float", widths=[4])["v"]:
        _same(got, h.astype(np.float32))


def test_float_to_half_rounds_to_nearest_even_and_keeps_subnormals() -> None:
    x = _floats()
    with np.errstate(over="ignore"):
        for (f,), got in evaluate({"h": "half(a)"}, [x], "half", widths=[1])["h"]:
            _same(got, f.astype(np.float16))
    assert (np.abs(x[np.isfinite(x)]) < 6e-5).sum() > 1000


def test_float_to_bfloat_rounds_to_nearest_even_and_flushes_subnormals() -> None:
    x = _floats()
    wanted = torch.from_numpy(_flushed(x)).to(torch.bfloat16).float().numpy()
    ((_, bits),) = evaluate({"b": "bfloat(a)"}, [x], "bfloat", widths=[1])["b"]
    _same((bits.astype(np.uint32) << 16).view(np.float32), wanted)


def test_bfloat_to_float_for_all_patterns() -> None:
    wanted = (ALL_16.astype(np.uint32) << 16).view(np.float32)
    ((_, got),) = evaluate({"f": "float(a)"}, [ALL_16], "float", types=["bfloat"], widths=[1])["f"]
    _same(got, wanted)


HALF_OPERATORS = {"sum": ("a + b", np.add), "product": ("a * b", np.multiply), "difference": ("a - b", np.subtract)}


def test_half_arithmetic_rounds_every_operation() -> None:
    a, b = RNG(3).integers(0, 0x7800, (2, 8192)).astype(np.uint16).view(np.float16)
    with np.errstate(all="ignore"):
        for name, results in evaluate({n: e for n, (e, _) in HALF_OPERATORS.items()}, [a, b], "half").items():
            for (x, y), got in results:
                _same(got, HALF_OPERATORS[name][1](x, y))
        steps = evaluate({"steps": "[&] { auto p = a * b; auto q = p + a; return q - b; }()"}, [a, b], "half")["steps"]
        for (x, y), got in steps:
            _same(got, (x * y + x) - y)


def test_bfloat_arithmetic_rounds_every_operation() -> None:
    a, b = RNG(4).integers(0x3000, 0x5000, (2, 4096)).astype(np.uint16)
    x, y = (torch.from_numpy(v.view(np.int16)).view(torch.bfloat16) for v in (a, b))
    wanted = {"sum": x + y, "product": x * y, "quotient": x / y, "with_int": x * 3, "steps": (x * y + x) - y}
    expressions = {
        "sum": "a + b",
        "product": "a * b",
        "quotient": "a / b",
        "with_int": "a * 3",
        "steps": "[&] { auto p = a * b; auto q = p + a; return q - b; }()",
    }
    for name, ((_, got),) in evaluate(expressions, [a, b], "bfloat", types=["bfloat"] * 2, widths=[1]).items():
        np.testing.assert_array_equal(got, wanted[name].view(torch.int16).numpy().view(np.uint16), name)
    ((_, got),) = evaluate({"wide": "a * b + 1.0f"}, [a, b], "float", types=["bfloat"] * 2, widths=[1])["wide"]
    np.testing.assert_array_equal(got, ((x * y).float() + 1).numpy())


def test_float_subnormals_are_flushed_and_half_subnormals_are_not() -> None:
    x = np.float32([1e-40, -1e-40, 1.5e-38, 1e-20])
    for (f,), got in evaluate({"f": "a * 0.5f + 0.0f"}, [x], "float", widths=[1])["f"]:
        np.testing.assert_array_equal(got, np.float32([0, 0, 0, 5e-21]) if f is not None else None)
    subnormal = ALL_HALF[1:0x400].copy()
    for (h,), got in evaluate({"h": "a * 1.0h", "g": "a * 16384.0h"}, [subnormal], "half", widths=[1])["g"]:
        _same(got, h * np.float16(16384))
    assert evaluate({"h": "a * 1.0h"}, [subnormal], "half", widths=[1])["h"][0][1].all()


@pytest.mark.parametrize("dtype", INTEGERS, ids=type_name)
def test_float_to_integer_saturates(dtype: type) -> None:
    info = np.iinfo(dtype)
    x = np.concatenate(
        [_floats()[::7], np.float32([1e10, -1e10, 1e20, -1e20, np.nan, np.inf, -np.inf, 2.5, -2.5, 255, 256])]
    )
    h = ALL_HALF[::5].copy()
    for source, stored in (("float", x), ("half", h)):
        with np.errstate(invalid="ignore"):  # signalling NaNs
            values = stored.astype(np.float64)
        finite = np.where(np.isfinite(values), values, 0)
        wide = np.trunc(finite) + np.where(np.isinf(values), np.copysign(1e30, values), 0)
        wanted = [min(max(int(v), info.min), info.max) for v in wide]
        for (rolled,), got in evaluate(
            {"i": f"{type_name(dtype)}(a)"}, [stored], type_name(dtype), types=[source], widths=[1]
        )["i"]:
            np.testing.assert_array_equal(got, np.array(wanted, dtype) if rolled is not None else None)


def test_literals_have_metal_types() -> None:
    compile_metal("""
static_assert(is_same_v<decltype(1.5), float> && is_same_v<decltype(1.5h), half> && is_same_v<decltype(1e3), float>,
    "");
static_assert(is_same_v<decltype(2.0bf), bfloat> && is_same_v<decltype(1.0f * 1.0h),
    float> && is_same_v<decltype(1.5h + 1), half>, "");
static_assert(is_same_v<decltype(bfloat(1) * bfloat(2)), bfloat> && is_same_v<decltype(bfloat(1) * 2.0f), float>, "");
static_assert(is_same_v<decltype(bfloat(1) * 2), bfloat> && is_same_v<decltype(bfloat(1) * 2.0h), float>, "");
static_assert(is_same_v<decltype(exp(1.0h)), half> && is_same_v<decltype(exp(bfloat(1))),
    float> && is_same_v<decltype(max(1, 2)), int>, "");
static_assert(!is_convertible_v<float, bfloat> && !is_convertible_v<half, bfloat> && is_convertible_v<bfloat,
    float>, "");
static_assert(is_convertible_v<int, bfloat> && !is_convertible_v<bfloat, half>, "");
""")


@pytest.mark.parametrize(
    "body", ["bfloat b = 1.5f;", "half h = 1; bfloat b = h;", "bfloat b(1); half h = b;", "bfloat b(1); b = exp(b);"]
)
def test_implicit_conversions_to_and_from_bfloat_are_refused(body: str) -> None:
    assert "error:" in refuse(f"kernel void k(device float* a [[buffer(0)]]) {{ {body} }}")


def test_bfloat_in_ordinary_code() -> None:
    source = """
union Bits { bfloat b[2]; uint u; };
kernel void k(device const bfloat* a [[buffer(0)]], device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  bfloat x = a[i], zero = 0; float y = x; bool positive = x > 0; x += 1; x *= 2.0f;
  bfloat c = positive ? x : 0; float d = positive ? x : 0.5f; int n = int(x); Bits u; u.b[0] = x; u.b[1] = zero;
  out[i] = y + float(c) + d + n + as_type<ushort>(a[i]) + u.u + (x == c) + (-x < zero) + float4(x).w + (float2(1,
    2) * x).y;
}"""
    values = np.float32([1.5, -2.25, 7, 100])
    out = np.zeros(4, np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    run(source, bits, out, threads=4)
    x = (values + 1) * 2
    positive = values > 0
    u = x.view(np.uint32) >> 16
    wanted = (
        values
        + np.where(positive, x, 0)
        + np.where(positive, x, 0.5)
        + np.trunc(x)
        + bits
        + u
        + (x == np.where(positive, x, 0))
        + (-x < 0)
        + x
        + 2 * x
    )
    np.testing.assert_allclose(out, wanted, rtol=1e-6)


EXACT_HALF = {
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "rint": np.rint,
    "fabs": np.abs,
    "abs": np.abs,
    "round": lambda x: np.copysign(np.floor(np.abs(x.astype(np.float64)) + 0.5), x).astype(np.float16),
}


def test_exact_functions_on_all_half_patterns() -> None:
    for name, results in evaluate({n: f"{n}(a)" for n in EXACT_HALF}, [ALL_HALF], "half", widths=[1, 2]).items():
        for (h,), got in results:
            with np.errstate(invalid="ignore"):
                _same(got, EXACT_HALF[name](h))


EXACT_FLOAT = {
    "floor": ("floor(a)", np.floor),
    "ceil": ("ceil(a)", np.ceil),
    "trunc": ("trunc(a)", np.trunc),
    "rint": ("rint(a)", np.rint),
    "round": ("round(a)", lambda a, b, c: np.copysign(np.floor(np.abs(a.astype(np.float64)) + 0.5), a)),
    "fabs": ("fabs(a)", np.abs),
    "fmod": ("fmod(a, b)", np.fmod),
    "copysign": ("copysign(a, b)", np.copysign),
    "fmin": ("fmin(a, b)", np.fmin),
    "fmax": ("fmax(a, b)", np.fmax),
    "min": ("min(a, b)", np.fmin),
    "max": ("max(a, b)", np.fmax),
    "fdim": ("fdim(a, b)", lambda a, b, c: np.maximum(a - b, 0)),
    "fract": ("fract(a)", lambda a, b, c: np.minimum(a - np.floor(a), np.float32(1 - 2**-24))),
    "min3": ("min3(a, b, c)", lambda a, b, c: np.fmin(a, np.fmin(b, c))),
    "max3": ("max3(a, b, c)", lambda a, b, c: np.fmax(a, np.fmax(b, c))),
    "median3": ("median3(a, b, c)", lambda a, b, c: np.median([a, b, c], axis=0)),
    "clamp": ("clamp(a, -1.0f, 2.0f)", lambda a, b, c: np.clip(a, -1, 2)),
    "saturate": ("saturate(a)", lambda a, b, c: np.clip(a, 0, 1)),
    "sign": ("sign(a)", np.sign),
    "step": ("step(a, b)", lambda a, b, c: (b >= a).astype(np.float32)),
    "ldexp": ("ldexp(a, 3)", lambda a, b, c: a * 8),
    "fma": ("fma(a, b, c)", lambda a, b, c: (a.astype(np.longdouble) * b + c).astype(np.float32)),
    "contracted": ("a * b + c", lambda a, b, c: (a.astype(np.longdouble) * b + c).astype(np.float32)),
    "separate": ("[&] { auto p = a * b; return p + c; }()", lambda a, b, c: a * b + c),
    "modf": (
        "[&] { decltype(a) w; auto f = modf(a, w); return f + w * 4; }()",
        lambda a, b, c: np.modf(a)[0] + np.modf(a)[1] * np.float32(4),
    ),
    "nextafter": ("nextafter(a, b)", np.nextafter),
    "mix": ("mix(a, b, 0.25f)", lambda a, b, c: None),
}


def test_exact_functions_of_float() -> None:
    a, b, c = (RNG(5).normal(0, 5, (3, 4096))).astype(np.float32)
    b[b == 0] = 1
    made = evaluate({n: e for n, (e, _) in EXACT_FLOAT.items() if n not in ("contracted", "mix")}, [a, b, c], "float")
    unary = {"floor", "ceil", "trunc", "rint", "fabs", "sign"}
    binary = {"fmod", "copysign", "fmin", "fmax", "min", "max", "nextafter"}
    for name, results in made.items():
        reference = EXACT_FLOAT[name][1]
        for (x, y, z), got in results:
            wanted = reference(x) if name in unary else reference(x, y) if name in binary else reference(x, y, z)
            np.testing.assert_array_equal(got, np.asarray(wanted, np.float32), name)
    # Inside one expression, a product and a sum of scalars become one operation, which rounds once.
    ((x, got),) = evaluate({"f": "a * b + c"}, [a, b, c], "float", widths=[1])["f"]
    np.testing.assert_array_equal(got, EXACT_FLOAT["contracted"][1](*x))
    assert (got != x[0] * x[1] + x[2]).any()


def _nearest_half(exact: np.ndarray) -> np.ndarray:
    """Rounds a long double to half once. NumPy's own conversion first rounds to single precision."""
    near = exact.astype(np.float16)
    choices = np.stack([near, np.nextafter(near, np.float16(-np.inf)), np.nextafter(near, np.float16(np.inf))])
    distance = np.where(np.isfinite(choices), np.abs(choices.astype(np.longdouble) - exact), np.inf)
    best = np.take_along_axis(choices, distance.argmin(0)[None], 0)[0]
    return np.where(np.isfinite(near), best, near)


def test_half_fma_has_one_rounding() -> None:
    a, b, c = RNG(6).integers(0, 0x7000, (3, 1 << 15)).astype(np.uint16).view(np.float16) * RNG(7).choice(
        np.float16([1, -1]), (3, 1 << 15)
    )
    with np.errstate(over="ignore"):
        for (x, y, z), got in evaluate({"f": "fma(a, b, c)"}, [a, b, c], "half")["f"]:
            _same(got, _nearest_half(x.astype(np.longdouble) * y + z))


def test_frexp_and_ilogb() -> None:
    x = np.concatenate([RNG(8).normal(0, 1e10, 500), [0, 1, -2, 0.75]]).astype(np.float32)
    wanted_m, wanted_e = np.frexp(x)
    both = evaluate({"f": "[&] { int e; float m = frexp(a, e); return m; }()"}, [x], "float", widths=[1])["f"]
    np.testing.assert_array_equal(both[0][1], wanted_m)
    exponent = evaluate({"e": "[&] { int e; frexp(a, e); return e; }()", "l": "ilogb(a)"}, [x], "int", widths=[1])
    np.testing.assert_array_equal(exponent["e"][0][1], wanted_e)
    np.testing.assert_array_equal(exponent["l"][0][1][x != 0], wanted_e[x != 0] - 1)


TESTS = {"isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite, "signbit": np.signbit,
         "isnormal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny)}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=type_name)
def test_classes_of_numbers(dtype: type) -> None:
    x = _floats()[::5].copy() if dtype is np.float32 else ALL_HALF
    for name, results in evaluate({n: f"{n}(a)" for n in TESTS}, [x], "bool").items():
        for (v,), got in results:
            np.testing.assert_array_equal(got, TESTS[name](v), name)


def test_limits_and_constants() -> None:
    lines = [
        f'static_assert(numeric_limits<{type_name(t)}>::max() == {np.iinfo(t).max}{"u" * (np.iinfo(t).min == 0)}l, "");'
        f"static_assert(numeric_limits<{type_name(t)}>::min() == "
        f'{np.iinfo(t).min + (np.iinfo(t).min < 0)}l - {int(np.iinfo(t).min < 0)}, "");'
        for t in INTEGERS
    ]
    compile_metal("\n".join(lines))
    names = [
        "M_PI_F",
        "M_E_F",
        "M_SQRT2_F",
        "M_LN2_F",
        "FLT_MAX",
        "FLT_MIN",
        "FLT_EPSILON",
        "INFINITY",
        "MAXFLOAT",
        "float(HALF_MAX)",
        "float(HALF_MIN)",
        "float(HALF_EPSILON)",
        "float(M_PI_H)",
        "float(numeric_limits<half>::max())",
        "numeric_limits<float>::lowest()",
        "float(numeric_limits<bfloat>::max())",
        "numeric_limits<float>::infinity()",
        "float(numeric_limits<half>::denorm_min())",
        "HUGE_VALF",
        "NAN",
    ]
    out = np.zeros(len(names), np.float32)
    run(
        "kernel void k(device float* o [[buffer(0)]]) { "
        + " ".join(f"o[{i}] = {n};" for i, n in enumerate(names))
        + " }",
        out,
    )
    f32, f16 = np.finfo(np.float32), np.finfo(np.float16)
    wanted = [
        np.pi,
        np.e,
        np.sqrt(2),
        np.log(2),
        f32.max,
        f32.tiny,
        f32.eps,
        np.inf,
        f32.max,
        f16.max,
        f16.tiny,
        f16.eps,
        np.float16(np.pi),
        f16.max,
        f32.min,
        torch.finfo(torch.bfloat16).max,
        np.inf,
        f16.smallest_subnormal,
        np.inf,
        np.nan,
    ]
    np.testing.assert_array_equal(out, np.float32(wanted))
