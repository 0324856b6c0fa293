"""Compares math functions with NumPy in double precision. Errors must stay within Metal's limits."""

import numpy as np
import pytest
from msl_kernels import evaluate

N = 4096


def _values(low: float, high: float, dtype: type, log: bool = False) -> np.ndarray:
    rng = np.random.default_rng(7)
    x = np.exp(rng.uniform(np.log(low), np.log(high), N)) if log else rng.uniform(low, high, N)
    return x.astype(dtype)


# name -> (reference, ulps allowed for float, input range for float, input range for half). The ulps come from the MSL
# specification's accuracy table for single precision without fast math. For half, the specification allows 1 ulp.
INEXACT = {
    "acos": (np.arccos, 4, (-1, 1), (-1, 1)),
    "acosh": (np.arccosh, 4, (1, 1e6), (1, 6e4)),
    "asin": (np.arcsin, 4, (-1, 1), (-1, 1)),
    "asinh": (np.arcsinh, 4, (-1e3, 1e3), (-1e3, 1e3)),
    "atan": (np.arctan, 5, (-50, 50), (-50, 50)),
    "atanh": (np.arctanh, 5, (-0.999, 0.999), (-0.99, 0.99)),
    "cos": (np.cos, 4, (-10, 10), (-10, 10)),
    "cosh": (np.cosh, 4, (-80, 80), (-11, 11)),
    "cospi": (lambda x: np.cos(np.pi * x), 4, (-0.49, 0.49), (-0.49, 0.49)),
    "exp": (np.exp, 4, (-80, 88), (-8, 11)),
    "exp2": (np.exp2, 4, (-120, 127), (-12, 15)),
    "exp10": (lambda x: 10.0**x, 4, (-37, 38), (-4, 4.5)),
    "log": (np.log, 4, (1e-30, 1e30), (1e-4, 6e4)),
    "log2": (np.log2, 4, (1e-30, 1e30), (1e-4, 6e4)),
    "log10": (np.log10, 4, (1e-30, 1e30), (1e-4, 6e4)),
    "sin": (np.sin, 4, (-10, 10), (-10, 10)),
    "sinh": (np.sinh, 4, (-80, 80), (-11, 11)),
    "sinpi": (lambda x: np.sin(np.pi * x), 4, (-0.5, 0.5), (-0.5, 0.5)),
    "tan": (np.tan, 6, (-1.5, 1.5), (-1.5, 1.5)),
    "tanh": (np.tanh, 5, (-8, 8), (-4, 4)),
    "tanpi": (lambda x: np.tan(np.pi * x), 6, (-0.49, 0.49), (-0.49, 0.49)),
}
LOGARITHMIC = {"log", "log2", "log10", "acosh"}
EXACT = {"sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)}


def _ulps(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the error in units in the last place of the correctly rounded result."""
    unit = np.spacing(np.abs(wanted).astype(got.dtype)).astype(np.float64)
    return np.abs(got.astype(np.float64) - wanted) / unit


def _errors(name: str, dtype: type, seed: int, prefix: str = "") -> float:
    reference, _, *ranges = INEXACT[name]
    x = _values(*ranges[dtype is np.float16], dtype, name in LOGARITHMIC)
    worst = 0.0
    metal = "half" if dtype is np.float16 else "float"
    for (rolled,), got in evaluate({f: f"{prefix}{f}(a)" for f in INEXACT}, [x], metal, only=[name], perturb_seed=seed)[
        name
    ]:
        wanted = reference(rolled.astype(np.float64))
        normal = np.abs(wanted) >= np.finfo(dtype).tiny
        worst = max(worst, _ulps(got[normal], wanted[normal]).max())
    return worst


@pytest.mark.parametrize("name", INEXACT)
def test_float_functions_stay_within_promise_and_use_it(name: str) -> None:
    promised = INEXACT[name][1]
    best = _errors(name, np.float32, seed=0)
    worst = max(_errors(name, np.float32, seed=s) for s in (1, 2))
    assert best <= 1
    assert 1.5 < worst <= promised


@pytest.mark.parametrize("name", INEXACT)
def test_half_functions_stay_within_one_ulp_and_use_it(name: str) -> None:
    assert _errors(name, np.float16, seed=0) <= 0.502
    assert 0.6 < max(_errors(name, np.float16, seed=s) for s in (1, 2)) <= 1


@pytest.mark.parametrize("name", INEXACT)
def test_precise_is_the_plain_function(name: str) -> None:
    assert _errors(name, np.float32, seed=3, prefix="precise::") == _errors(name, np.float32, seed=3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seed", [0, 5])
def test_roots_are_correctly_rounded(name: str, dtype: type, seed: int) -> None:
    x = _values(1e-30, 1e30, dtype, True) if dtype is np.float32 else np.arange(1, 0x7C00, dtype=np.uint16).view(dtype)
    metal = "half" if dtype is np.float16 else "float"
    for (rolled,), got in evaluate({f: f"{f}(a)" for f in EXACT}, [x], metal, only=[name], perturb_seed=seed)[name]:
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, EXACT[name](rolled.astype(np.float64)).astype(dtype))


# The error limits of the fast:: functions, from MSL's table with fast math: in ulps, or absolute for values of
# magnitude at most 1.
FAST = {
    "exp": lambda x: 3 + np.floor(np.abs(2 * x)),
    "exp2": lambda x: 3 + np.floor(np.abs(2 * x)),
    "log": lambda x: np.full_like(x, 3),
    "log2": lambda x: np.full_like(x, 3),
    "acos": lambda x: np.full_like(x, 5),
    "atan": lambda x: np.full_like(x, 5),
    "tanh": lambda x: np.full_like(x, 5),
}


@pytest.mark.parametrize("name", FAST)
def test_fast_functions_stay_within_their_wider_promise(name: str) -> None:
    reference, precise, bounds, _ = INEXACT[name]
    x = _values(*bounds, np.float32, name in LOGARITHMIC)
    if name.startswith("log"):
        x = x[(x < 0.5) | (x > 2)]
    largest = 0.0
    for (rolled,), got in evaluate({f: f"fast::{f}(a)" for f in FAST}, [x], "float", only=[name], perturb_seed=4)[name]:
        exact = rolled.astype(np.float64)
        wanted = reference(exact)
        normal = np.abs(wanted) >= np.finfo(np.float32).tiny
        errors = _ulps(got, wanted)[normal]
        assert (errors <= FAST[name](exact)[normal]).all()
        largest = max(largest, errors.max())
    assert largest > (precise if name.startswith("exp") else 1.5)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_fast_sine_has_an_absolute_error(name: str) -> None:
    x = _values(-3.14, 3.14, np.float32)
    worst = 0.0
    for (rolled,), got in evaluate({name: f"fast::{name}(a)"}, [x], "float", perturb_seed=4)[name]:
        worst = max(worst, np.abs(got - INEXACT[name][0](rolled.astype(np.float64))).max())
        assert (np.abs(got) <= 1).all()
    assert 2**-15 < worst <= 2**-13


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_functions_of_two_arguments(seed: int) -> None:
    x, y = _values(1e-3, 1e3, np.float32, True), _values(-5, 5, np.float32)
    made = evaluate(
        {"pow": "pow(a, b)", "powr": "powr(a, b)", "atan2": "atan2(b, a)"}, [x, y], "float", perturb_seed=seed
    )
    for name, promised, reference in (
        ("pow", 16, np.power),
        ("powr", 16, np.power),
        ("atan2", 6, lambda a, b: np.arctan2(b, a)),
    ):
        errors = [_ulps(got, reference(a.astype(np.float64), b.astype(np.float64))).max() for (a, b), got in made[name]]
        assert (0 if seed == 0 else 1.5) <= max(errors) <= promised


def test_division_is_correctly_rounded() -> None:
    x, y = _values(1e-10, 1e10, np.float32, True), _values(1e-3, 1e3, np.float32, True)[::-1].copy()
    made = evaluate({"op": "a / b", "divide": "divide(a, b)"}, [x, y], "float", perturb_seed=9)
    for name in made:
        for (a, b), got in made[name]:
            np.testing.assert_array_equal(got, a / b)
    h = np.random.default_rng(1).integers(0, 0x7C00, (2, 4096)).astype(np.uint16).view(np.float16)
    for (a, b), got in evaluate({"op": "a / b"}, [h[0], h[1]], "half", perturb_seed=9)["op"]:
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(got, a / b)


def test_fast_division_is_off_by_its_promise_at_most() -> None:
    x, y = _values(1e-10, 1e10, np.float32, True), _values(1e-3, 1e3, np.float32, True)[::-1].copy()
    errors = []
    for (a, b), got in evaluate({"divide": "fast::divide(a, b)"}, [x, y], "float", perturb_seed=9)["divide"]:
        errors.append(_ulps(got, a.astype(np.float64) / b).max())
    assert 1 < max(errors) <= 2.5


# C99's special cases: (expression, input a, exact result). The device adds no error to these results.
SPECIAL = [
    ("exp(a)", 0.0, 1.0),
    ("exp(a)", -np.inf, 0.0),
    ("exp(a)", np.inf, np.inf),
    ("exp(a)", 100.0, np.inf),
    ("exp2(a)", 0.0, 1.0),
    ("log(a)", 1.0, 0.0),
    ("log(a)", 0.0, -np.inf),
    ("log(a)", -1.0, np.nan),
    ("log2(a)", np.inf, np.inf),
    ("cos(a)", 0.0, 1.0),
    ("cos(a)", np.inf, np.nan),
    ("sin(a)", -0.0, -0.0),
    ("cosh(a)", 0.0, 1.0),
    ("tanh(a)", np.inf, 1.0),
    ("sqrt(a)", -1.0, np.nan),
    ("sqrt(a)", -0.0, -0.0),
    ("rsqrt(a)", 0.0, np.inf),
    ("rsqrt(a)", np.inf, 0.0),
    ("pow(a, float(0))", np.nan, 1.0),
    ("pow(float(1), a)", np.nan, 1.0),
    ("pow(a, float(3))", -np.inf, -np.inf),
    ("sinpi(a)", 3.0, 0.0),
    ("cospi(a)", 2.5, 0.0),
    ("atan2(a, float(-1))", -0.0, -np.pi),
]


@pytest.mark.parametrize(("expression", "x", "wanted"), SPECIAL)
def test_special_cases(expression: str, x: float, wanted: float) -> None:
    ((_, got),) = evaluate({"f": expression}, [np.float32([x])], "float", widths=[1], perturb_seed=0)["f"]
    np.testing.assert_allclose(got[0], np.float32(wanted), rtol=2e-7)
    if wanted == 0:
        assert np.signbit(got[0]) == np.signbit(wanted) or "pi(" in expression


def test_results_of_bounded_functions_stay_bounded() -> None:
    x = np.float32(np.pi / 2) + np.linspace(-1e-3, 1e-3, 2048, dtype=np.float32)
    for seed in (1, 2, 3):
        made = evaluate({"s": "sin(a)", "f": "fast::sin(a)", "t": "tanh(a * 10)"}, [x], "float", perturb_seed=seed)
        assert all((np.abs(got) <= 1).all() for results in made.values() for _, got in results)


def test_sincos_gives_both() -> None:
    x = _values(-10, 10, np.float32)
    source = {"s": "[&] { decltype(a) c; auto s = sincos(a, c); return s * s + c * c; }()"}
    for _, got in evaluate(source, [x], "float", perturb_seed=2)["s"]:
        assert np.abs(got - 1).max() < 4e-6
        assert np.abs(got - 1).max() > 0
