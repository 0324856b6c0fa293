"""Tests that MLX's elementwise, reduction, scan, sort and softmax kernels give correct results, unmodified."""

import math

import numpy as np
import pytest
from mlx_kernels import assert_within, launch, mlx
from msl_kernels import from_bfloat, to_bfloat

EPS = 2.0**-23
RNG = np.random.default_rng


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


# functor -> (reference, lowest input, highest input, relative error in units of 2^-23, absolute error)
UNARY = {
    "Abs": (np.abs, -9, 9, 0, 0),
    "ArcSin": (np.arcsin, -1, 1, 4, 0),
    "Ceil": (np.ceil, -9, 9, 0, 0),
    "Erf": (_erf, -4, 4, 8, 1e-7),
    "Exp": (np.exp, -10, 10, 4, 0),
    # Beyond +-0.34, MLX subtracts a multiple of log(2). The rounding error of this constant then dominates.
    "Expm1": (np.expm1, -0.34, 0.34, 8, 1e-7),
    "Log1p": (np.log1p, -0.4, 50, 16, 1e-7),
    "Negative": (np.negative, -9, 9, 0, 0),
    "Round": (np.rint, -9, 9, 0, 0),
    "Rsqrt": (lambda x: 1 / np.sqrt(x), 0.01, 9, 1, 0),
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -9, 9, 8, 0),
    "Sign": (np.sign, -9, 9, 0, 0),
    "Sqrt": (np.sqrt, 0, 9, 1, 0),
    "Square": (np.square, -9, 9, 1, 0),
    "Tanh": (np.tanh, -4, 4, 8, 1e-7),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str, dtype: type) -> None:
    metal = "half" if dtype is np.float16 else "float"
    library = mlx(["unary_ops.h", "fp8.h", "unary.h"], [f"unary_v<{metal}, {metal}, {o}>" for o in UNARY])
    reference, low, high, ulps, absolute = UNARY[op]
    x = RNG(1).uniform(low, high, 1001).astype(dtype)
    y = np.zeros_like(x)
    per_thread = 8 // x.itemsize
    launch(library, f"unary_v<{metal}, {metal}, {op}>", x, y, np.uint32(x.size), threads=-(-x.size // per_thread),
           group=64, perturb_seed=3)  # fmt: skip
    wanted = reference(x.astype(np.float64))
    unit = EPS if dtype is np.float32 else 2.0**-10
    factor = ulps if dtype is np.float32 else min(ulps, 3)
    floor = absolute if dtype is np.float32 else 2.0**-20
    assert_within(y, wanted, factor * unit * np.abs(wanted) + (floor if factor else 0))


# functor -> (result type, reference, relative error in units of 2^-23, absolute error)
BINARY = {
    "Add": (np.float32, np.add, 0.5, 0),
    "Divide": (np.float32, np.divide, 0.5, 0),
    "Maximum": (np.float32, np.maximum, 0, 0),
    "Minimum": (np.float32, np.minimum, 0, 0),
    "Multiply": (np.float32, np.multiply, 0.5, 0),
    "Power": (np.float32, lambda a, b: np.abs(a) ** b, 16, 0),
    "Remainder": (np.float32, np.mod, 0, 1e-5),
    "LogAddExp": (np.float32, np.logaddexp, 4, 4e-7),
    "ArcTan2": (np.float32, np.arctan2, 6, 0),
    "Less": (np.bool_, np.less, 0, 0),
    "GreaterEqual": (np.bool_, np.greater_equal, 0, 0),
}


@pytest.mark.parametrize("op", BINARY)
def test_binary(op: str) -> None:
    out, reference, ulps, absolute = BINARY[op]
    name = f"binary_vv<float, {'bool' if out is np.bool_ else 'float'}, {op}>"
    library = mlx(
        ["binary_ops.h", "binary.h"],
        [f"binary_vv<float, {'bool' if BINARY[o][0] is np.bool_ else 'float'}, {o}>" for o in BINARY],
    )
    a, b = RNG(2).uniform(-6, 6, (2, 777)).astype(np.float32)
    a = np.abs(a) if op == "Power" else a
    c = np.zeros(a.size, out)
    launch(library, name, a, b, c, np.uint32(a.size), threads=-(-a.size // 2), group=32, perturb_seed=3)
    wanted = reference(a.astype(np.float64), b.astype(np.float64))
    assert_within(c, wanted, ulps * EPS * np.abs(wanted) + absolute)


def test_binary_integers_and_scalars() -> None:
    names = ["binary_sv<int, int, FloorDivide>", "binary_vs<uint, uint, LeftShift>", "binary_ss<long, long, Subtract>",
             "binary_vv<half, half, Add>", "binary_vv<bfloat, bfloat, Multiply>"]  # fmt: skip
    library = mlx(["binary_ops.h", "binary.h"], names)
    b = np.array([3, -3, 7, -7, 50, 1], np.int32)
    c = np.zeros_like(b)
    launch(library, names[0], np.int32([-50]), b, c, np.uint32(6), threads=3, group=3)
    np.testing.assert_array_equal(c, -50 // b)
    u = np.arange(6, dtype=np.uint32)
    launch(library, names[1], u, np.uint32([3]), c, np.uint32(6), threads=3, group=3)
    np.testing.assert_array_equal(c, u << 3)
    wide = np.zeros(1, np.int64)
    launch(library, names[2], np.int64([1 << 40]), np.int64([3]), wide, threads=1, group=1)
    assert wide[0] == (1 << 40) - 3
    h = RNG(3).uniform(-9, 9, (2, 100)).astype(np.float16)
    r = np.zeros(100, np.float16)
    launch(library, names[3], h[0], h[1], r, np.uint32(100), threads=25, group=25)
    np.testing.assert_array_equal(r, h[0] + h[1])
    x = to_bfloat(RNG(4).uniform(-9, 9, (2, 100)))
    bits = np.zeros(100, np.uint16)
    launch(library, names[4], x[0], x[1], bits, np.uint32(100), threads=25, group=25)
    np.testing.assert_array_equal(bits, to_bfloat(from_bfloat(x[0]) * from_bfloat(x[1])))


def test_select_arange_copy() -> None:
    library = mlx(["ternary_ops.h", "ternary.h", "arange.h", "copy.h"],
                  ["ternary_v<float, Select, false, false>", "arange<half>", "arange<int>", "copy_v<float, half>",
                   "copy_v<float, bfloat>", "copy_v<half, int>", "copy_v<bool, float>"])  # fmt: skip
    a, b = RNG(5).uniform(-1e3, 1e3, (2, 101)).astype(np.float32)
    mask = a > b
    out = np.zeros_like(a)
    launch(library, "ternary_v<float, Select, false, false>", mask, a, b, out, np.uint32(101), threads=51, group=51)
    np.testing.assert_array_equal(out, np.where(mask, a, b))
    steps = np.zeros(40, np.float16)
    launch(library, "arange<half>", np.float16(2), np.float16(0.5), steps, threads=40, group=40)
    np.testing.assert_array_equal(steps, np.float16(2) + np.arange(40, dtype=np.float16) * np.float16(0.5))
    counts = np.zeros(40, np.int32)
    launch(library, "arange<int>", 7, -3, counts, threads=40, group=40)
    np.testing.assert_array_equal(counts, 7 - 3 * np.arange(40))
    half = np.zeros(101, np.float16)
    launch(library, "copy_v<float, half>", a, half, np.uint32(101), threads=26, group=26)
    np.testing.assert_array_equal(half, a.astype(np.float16))
    bits = np.zeros(101, np.uint16)
    launch(library, "copy_v<float, bfloat>", a, bits, np.uint32(101), threads=26, group=26)
    np.testing.assert_array_equal(bits, to_bfloat(a))
    whole = np.zeros(101, np.int32)
    launch(library, "copy_v<half, int>", half, whole, np.uint32(101), threads=51, group=51)
    np.testing.assert_array_equal(whole, np.trunc(half).astype(np.int32))
    launch(library, "copy_v<bool, float>", mask, out, np.uint32(101), threads=51, group=51)
    np.testing.assert_array_equal(out, mask)


@pytest.mark.parametrize("size", [5, 128, 1000])
@pytest.mark.parametrize("kernel", ["softmax_single_row", "softmax_looped"])
@pytest.mark.parametrize("metal", ["float", "half", "bfloat"])
def test_softmax(kernel: str, metal: str, size: int) -> None:
    names = [f"{k}<{t}, float>" for k in ("softmax_single_row", "softmax_looped") for t in ("float", "half", "bfloat")]
    library = mlx(["softmax.h"], names)
    rows = 3
    x = RNG(6).normal(0, 3, (rows, size)).astype(np.float32)
    stored = {"float": x, "half": x.astype(np.float16), "bfloat": to_bfloat(x)}[metal]
    exact = (from_bfloat(stored) if metal == "bfloat" else stored).astype(np.float64)
    y = np.zeros_like(stored)
    threads = 1024 if kernel.endswith("looped") else -(-size // 4 // 32) * 32 + 32
    launch(library, f"{kernel}<{metal}, float>", stored, y, size, groups=rows, group=threads, perturb_seed=5)
    e = np.exp(exact - exact.max(1, keepdims=True))
    wanted = e / e.sum(1, keepdims=True)
    unit = {"float": EPS, "half": 2.0**-10, "bfloat": 2.0**-7}[metal]
    got = from_bfloat(y) if metal == "bfloat" else y
    distance = np.abs(exact - exact.max(1, keepdims=True))
    spread = (8 + 2 * distance + 2 * distance.max(1, keepdims=True)) * EPS  # fast::exp: 3 + 2|x| ulps
    assert_within(got, wanted, wanted * (spread + unit) + 2.0**-25)


@pytest.mark.parametrize("size", [7, 300])
def test_logsumexp_and_cross_entropy(size: int) -> None:
    library = mlx(
        ["logsumexp.h", "cross_entropy.h"], ["logsumexp<float>", "logsumexp_looped<half>", "cross_entropy<float>"]
    )
    x = RNG(7).normal(0, 3, (4, size)).astype(np.float32)
    out = np.zeros(4, np.float32)
    launch(library, "logsumexp<float>", x, out, size, groups=4, group=96, perturb_seed=5)
    wanted = np.log(np.exp(x.astype(np.float64)).sum(1))
    assert_within(out, wanted, 64 * EPS + 4 * EPS * np.abs(wanted))
    h = x.astype(np.float16)
    half = np.zeros(4, np.float16)
    launch(library, "logsumexp_looped<half>", h, half, size, groups=4, group=1024, perturb_seed=5)
    exact = np.log(np.exp(h.astype(np.float64)).sum(1))
    assert_within(half, exact, 2.0**-10 * np.abs(exact))
    targets = RNG(8).integers(0, size, 4).astype(np.int32)
    launch(library, "cross_entropy<float>", x, targets, out, size, groups=4, group=64, perturb_seed=5)
    loss = wanted - x[np.arange(4), targets]
    assert_within(out, loss, 64 * EPS + 8 * EPS * np.abs(wanted))


@pytest.mark.parametrize("op", ["Sum", "Prod", "Min", "Max"])
def test_reductions(op: str) -> None:
    header = ["atomic.h", "reduction/ops.h", "reduce.h"]
    kinds = [f"{o}<float>" for o in ("Sum", "Prod", "Min", "Max")]
    names = [f"{k}<float, float, {o}{extra}>" for o in kinds for k, extra in
             (("all_reduce", ""), ("row_reduce_simple", ""), ("col_reduce_longcolumn", ", long, 1"))]  # fmt: skip
    library = mlx(header, names)
    reference = {"Sum": np.sum, "Prod": np.prod, "Min": np.min, "Max": np.max}[op]
    x = RNG(9).uniform(0.8, 1.2, (8, 333)).astype(np.float32)
    size = np.uint64(x.size)
    bound = 400 * EPS if op in ("Sum", "Prod") else 0
    total = np.zeros(1, np.float32)
    launch(library, f"all_reduce<float, float, {op}<float>>", x, total, size, size, groups=1, group=128)
    wanted = reference(x.astype(np.float64))
    assert_within(total, wanted, bound * np.abs(wanted))
    rows = np.zeros(8, np.float32)
    launch(library, f"row_reduce_simple<float, float, {op}<float>>", x, rows, np.uint64(333), np.int64(8),
           groups=(1, 2), group=64)  # fmt: skip
    wanted = reference(x.astype(np.float64), axis=1)
    assert_within(rows, wanted, bound * np.abs(wanted))
    tall = np.ascontiguousarray(x.T)
    columns = np.zeros(8, np.float32)
    launch(library, f"col_reduce_longcolumn<float, float, {op}<float>, long, 1>", tall, columns, np.uint64(333),
           np.uint64(8), np.int32([1]), np.int64([0]), 0, np.int32([333]), np.int64([8]), 1, np.uint64(1),
           np.uint64(8), groups=(1, 1, 1), group=(8, 8))  # fmt: skip
    assert_within(columns, wanted, bound * np.abs(wanted))


def test_integer_reductions_are_exact() -> None:
    names = ["all_reduce<int, int, Sum<int>>", "all_reduce<long, long, Max<long>>", "all_reduce<bool, bool, And<bool>>"]
    library = mlx(["atomic.h", "reduction/ops.h", "reduce.h"], names)
    x = RNG(10).integers(-(1 << 20), 1 << 20, 5000).astype(np.int32)
    out = np.zeros(1, np.int32)
    launch(library, names[0], x, out, np.uint64(5000), np.uint64(5000), groups=1, group=256)
    assert out[0] == x.sum()
    wide = x.astype(np.int64) << 30
    most = np.zeros(1, np.int64)
    launch(library, names[1], wide, most, np.uint64(5000), np.uint64(5000), groups=1, group=256)
    assert most[0] == wide.max()
    flags = np.ones(5000, np.bool_)
    every = np.zeros(1, np.bool_)
    for spoilt in (False, True):
        flags[4321] = not spoilt
        launch(library, names[2], flags, every, np.uint64(5000), np.uint64(5000), groups=1, group=256)
        assert every[0] == (not spoilt)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
def test_scans(inclusive: bool, reverse: bool) -> None:
    flags = [f"{i}, {r}" for i in ("true", "false") for r in ("true", "false")]
    names = [f"contiguous_scan<{t}, {t}, {op}<{t}>, 4, {f}>" for f in flags
             for t, op in (("int", "CumSum"), ("float", "CumMax"), ("long", "CumSum"))]  # fmt: skip
    library = mlx(["binary_ops.h", "scan.h"], names)
    flag = f"{str(inclusive).lower()}, {str(reverse).lower()}"
    for metal, op, dtype in (
        ("int", "CumSum", np.int32),
        ("long", "CumSum", np.int64),
        ("float", "CumMax", np.float32),
    ):
        x = RNG(11).integers(-99, 99, (3, 700)).astype(dtype)
        y = np.zeros_like(x)
        launch(library, f"contiguous_scan<{metal}, {metal}, {op}<{metal}>, 4, {flag}>", x, y, np.uint64(700),
               groups=(1, 3), group=64)  # fmt: skip
        z = x[:, ::-1] if reverse else x
        wanted = np.cumsum(z, 1) if op == "CumSum" else np.maximum.accumulate(z, 1)
        if not inclusive:
            first = np.full((3, 1), 0 if op == "CumSum" else -np.inf).astype(dtype)
            wanted = np.concatenate([first, wanted[:, :-1]], 1)
        np.testing.assert_array_equal(y, wanted[:, ::-1] if reverse else wanted)


@pytest.mark.parametrize("size", [5, 128, 250])
def test_sort_and_search(size: int) -> None:
    names = [
        "block_sort<float, float, false, 32, 8>",
        "block_sort<int, uint, true, 32, 8>",
        "block_sort<half, half, false, 64, 4>",
    ]
    library = mlx(["sort.h", "searchsorted.h"], [*names, "searchsorted<float, false>", "searchsorted<float, true>"])
    strides = (size, 1, 1, size, size)
    x = RNG(12).normal(0, 9, (3, size)).astype(np.float32)
    y = np.zeros_like(x)
    launch(library, names[0], x, y, *strides, groups=(1, 3), group=32)
    np.testing.assert_array_equal(y, np.sort(x, 1))
    n = RNG(13).permuted(np.tile(np.arange(size, dtype=np.int32), (3, 1)), axis=1)
    order = np.zeros((3, size), np.uint32)
    launch(library, names[1], n, order, *strides, groups=(1, 3), group=32)
    np.testing.assert_array_equal(order, np.argsort(n, 1))
    h = x.astype(np.float16)
    z = np.zeros_like(h)
    launch(library, names[2], h, z, *strides, groups=(1, 3), group=64)
    np.testing.assert_array_equal(z, np.sort(h, 1))
    values = RNG(14).choice(y[0], 40)
    found = np.zeros(40, np.uint32)
    for right in (False, True):
        launch(library, f"searchsorted<float, {str(right).lower()}>", y[0].copy(), values, found, np.uint32(size),
               np.int64(1), threads=40, group=40)  # fmt: skip
        np.testing.assert_array_equal(found, np.searchsorted(y[0], values, "right" if right else "left"))


def test_hadamard() -> None:
    name = "hadamard_n<float, 64, 16, 4>"
    library = mlx(["steel/defines.h", "hadamard.h"], [name])
    x = RNG(15).normal(0, 1, (3, 64)).astype(np.float32)
    y = np.zeros_like(x)
    launch(library, name, x, y, 0.125, threads=(4, 3), group=(4, 1))
    matrix = np.array([[1.0]])
    while matrix.shape[0] < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    assert_within(y, x.astype(np.float64) @ matrix * 0.125, 64 * EPS)
