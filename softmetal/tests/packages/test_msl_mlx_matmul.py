"""Tests that MLX's matrix kernels give correct results, unmodified: gemv, steel GEMM, 4-bit kernels, attention."""

import struct

import numpy as np
import pytest
from mlx_kernels import UNUSED, assert_within, launch, mlx
from msl_kernels import from_bfloat, to_bfloat

RNG = np.random.default_rng
EPS = 2.0**-23
UNIT = {"float": EPS, "half": 2.0**-10, "bfloat": 2.0**-7}


NO_BATCH = [1.0, 0.0, 1, np.int32([1]), UNUSED, UNUSED, UNUSED, 1]


def _store(x: np.ndarray, metal: str) -> np.ndarray:
    return {
        "float": lambda: x.astype(np.float32),
        "half": lambda: x.astype(np.float16),
        "bfloat": lambda: to_bfloat(x),
    }[metal]()


def _load(x: np.ndarray, metal: str) -> np.ndarray:
    return (from_bfloat(x) if metal == "bfloat" else x).astype(np.float64)


def _bound(metal: str, wanted: np.ndarray, a: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Returns the error bound: one rounding to the output type, and single-precision sums of |a| |w|."""
    return UNIT[metal] * np.abs(wanted) + 32 * EPS * (np.abs(a) @ np.abs(w)) + 1e-7


@pytest.mark.parametrize("metal", ["float", "half", "bfloat"])
@pytest.mark.parametrize("size", [32, 130, 1041])
def test_gemv(metal: str, size: int) -> None:
    types = ("float", "half", "bfloat")
    library = mlx(["steel/utils.h", "gemv.h"], [f"gemv<{t}, 4, 1, 1, 32, 4, 4, false, false>" for t in types])
    rows = 50
    m, v = _store(RNG(1).normal(0, 1, (rows, size)), metal), _store(RNG(2).normal(0, 1, size), metal)
    out = np.zeros(rows, m.dtype)
    launch(library, f"gemv<{metal}, 4, 1, 1, 32, 4, 4, false, false>", m, v, v, out, size, rows, size, *NO_BATCH,
           groups=(-(-rows // 16), 1, 1), group=(32, 1, 4))  # fmt: skip
    wanted = _load(m, metal) @ _load(v, metal)
    assert_within(_load(out, metal), wanted, _bound(metal, wanted, _load(m, metal), _load(v, metal)))


@pytest.mark.parametrize("metal", ["float", "half", "bfloat"])
def test_gemv_of_a_transposed_matrix(metal: str) -> None:
    library = mlx(["steel/utils.h", "gemv.h"], [f"gemv_t<{metal}, 1, 2, 8, 4, 4, 4, false, false>"])
    rows, size = 64, 130  # only full tiles, because MLX's threads beyond the last column return before a barrier
    m, v = _store(RNG(1).normal(0, 1, (size, rows)), metal), _store(RNG(2).normal(0, 1, size), metal)
    out = np.zeros(rows, m.dtype)
    launch(library, f"gemv_t<{metal}, 1, 2, 8, 4, 4, 4, false, false>", m, v, v, out, size, rows, rows, *NO_BATCH,
           groups=(rows // 32, 1, 1), group=(32, 2, 1))  # fmt: skip
    wanted = _load(v, metal) @ _load(m, metal)
    assert_within(_load(out, metal), wanted, _bound(metal, wanted, _load(v, metal), _load(m, metal)))


GEMM = "steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h"
# (type, tile, whether A is transposed, whether B is transposed, (M, N, K))
PRODUCTS = [
    ("float", (64, 64, 16), False, False, (100, 72, 50)),
    ("half", (64, 64, 16), False, True, (64, 128, 64)),
    ("bfloat", (32, 32, 16), True, False, (45, 33, 40)),
    ("half", (64, 32, 32), True, True, (70, 40, 100)),
]


@pytest.mark.parametrize(("metal", "tile", "turned_a", "turned_b", "shape"), PRODUCTS)
def test_steel_gemm(metal: str, tile: tuple, turned_a: bool, turned_b: bool, shape: tuple) -> None:
    BM, BN, BK = tile
    M, N, K = shape
    name = f"gemm<{metal}, {BM}, {BN}, {BK}, 2, 2, {str(turned_a).lower()}, {str(turned_b).lower()}>"
    aligned = {"align_M": M % BM == 0, "align_N": N % BN == 0, "align_K": K % BK == 0}
    library = mlx(GEMM, [name], {"has_batch": False, "use_out_source": False, "do_axpby": False, **aligned})
    a, b = _store(RNG(3).normal(0, 1, (M, K)), metal), _store(RNG(4).normal(0, 1, (K, N)), metal)
    d = np.zeros((M, N), a.dtype)
    tiles_n, tiles_m = -(-N // BN), -(-M // BM)
    params = struct.pack("8iqqqiii4x", M, N, K, M if turned_a else K, K if turned_b else N, N, tiles_n, tiles_m,
                         0, 0, 0, 0, K // BK, 1)  # fmt: skip
    launch(library, name, np.ascontiguousarray(a.T if turned_a else a), np.ascontiguousarray(b.T if turned_b else b),
           None, d, params, groups=(tiles_n, tiles_m, 1), group=(32, 2, 2))  # fmt: skip
    wanted = _load(a, metal) @ _load(b, metal)
    assert_within(_load(d, metal), wanted, _bound(metal, wanted, _load(a, metal), _load(b, metal)))


def _affine(rows: int, columns: int, group: int, metal: str) -> tuple[np.ndarray, ...]:
    """Returns codes (packed along the last axis, low nibble first), scales, biases, and the decoded weight."""
    codes = RNG(5).integers(0, 16, (rows, columns))
    scales = _store(RNG(6).uniform(0.01, 0.1, (rows, columns // group)), metal)
    biases = _store(RNG(7).uniform(-0.5, 0.5, (rows, columns // group)), metal)
    words = (codes.reshape(rows, -1, 8) << (4 * np.arange(8))).sum(-1).astype(np.uint32)
    weight = codes * np.repeat(_load(scales, metal), group, 1) + np.repeat(_load(biases, metal), group, 1)
    return words, scales, biases, weight


QUANTIZED = "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"
BATCH = [1, UNUSED, UNUSED, 1, UNUSED, UNUSED, UNUSED, UNUSED]
AFFINE = [
    f"{k}<{t}, {g}, 4, {rest}>"
    for t in ("float", "half", "bfloat")
    for g in (32, 64)
    for k, rest in (
        ("affine_qmv", "false"),
        ("affine_qmv_fast", "false"),
        ("affine_qvm", "false"),
        ("affine_qmm_t", "false, false"),
        ("affine_qmm_n", "false"),
    )
]


@pytest.mark.parametrize("metal", ["float", "half", "bfloat"])
@pytest.mark.parametrize("group", [32, 64])
def test_affine_products(metal: str, group: int) -> None:
    library = mlx(QUANTIZED, [n for n in AFFINE if n.split("<")[1].startswith(f"{metal}, {group},")])
    name = f"<{metal}, {group}, 4, false>"
    for kernel, K, N in (("affine_qmv", 320, 45), ("affine_qmv_fast", 1024, 48)):
        words, scales, biases, weight = _affine(N, K, group, metal)
        x = _store(RNG(8).normal(0, 1, (3, K)), metal)
        y = np.zeros((3, N), x.dtype)
        launch(library, kernel + name, words, scales, biases, x, y, K, N, *BATCH, groups=(3, -(-N // 8), 1),
               group=(32, 2, 1))  # fmt: skip
        wanted = _load(x, metal) @ weight.T
        assert_within(_load(y, metal), wanted, _bound(metal, wanted, _load(x, metal), weight.T))
    K, N = 96, 128
    words, scales, biases, weight = _affine(K, N, group, metal)
    x = _store(RNG(9).normal(0, 1, (2, K)), metal)
    y = np.zeros((2, N), x.dtype)
    launch(
        library,
        "affine_qvm" + name,
        words,
        scales,
        biases,
        x,
        y,
        K,
        N,
        *BATCH,
        groups=(2, N // 64, 1),
        group=(32, 2, 1),
    )
    wanted = _load(x, metal) @ weight
    assert_within(_load(y, metal), wanted, _bound(metal, wanted, _load(x, metal), weight))


@pytest.mark.parametrize("metal", ["float", "half", "bfloat"])
@pytest.mark.parametrize("M", [7, 45, 64])
def test_affine_matrix_products(metal: str, M: int) -> None:
    group = 64
    library = mlx(QUANTIZED, [n for n in AFFINE if n.split("<")[1].startswith(f"{metal}, {group},")])
    # Before the product, the kernels round each weight to the activations' type.
    slack = UNIT[metal]
    for kernel, K, N in (
        (f"affine_qmm_t<{metal}, 64, 4, false, false>", 128, 45),
        (f"affine_qmm_n<{metal}, 64, 4, false>", 96, 64),
    ):
        turned = "qmm_t" in kernel
        words, scales, biases, weight = _affine(N if turned else K, K if turned else N, group, metal)
        w = weight.T if turned else weight
        x = _store(RNG(10).normal(0, 1, (M, K)), metal)
        y = np.zeros((M, N), x.dtype)
        launch(library, kernel, words, scales, biases, x, y, K, N, M, *BATCH, groups=(-(-N // 32), -(-M // 32), 1),
               group=(32, 2, 2))  # fmt: skip
        a = _load(x, metal)
        wanted = a @ w
        bound = _bound(metal, wanted, a, w) + 2 * slack * (np.abs(a) @ (np.abs(w) + 1))
        assert_within(_load(y, metal), wanted, bound)


def test_affine_quantize_and_back() -> None:
    library = mlx(
        QUANTIZED,
        ["affine_quantize<float, 64, 4>", "affine_dequantize<float, 64, 4>", "affine_dequantize<half, 32, 8>"],
    )
    w = RNG(11).normal(0, 1, (4, 256)).astype(np.float32)
    packed = np.zeros((4, 128), np.uint8)
    scales, biases = np.zeros((2, 4, 4), np.float32)
    launch(library, "affine_quantize<float, 64, 4>", w, packed, scales, biases, threads=(w.size // 2, 1), group=(64, 1))
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(4, 256)
    back = codes * np.repeat(scales, 64, 1) + np.repeat(biases, 64, 1)
    step = np.abs(np.repeat(scales, 64, 1))
    error = np.abs(back - w) / step
    assert error.max() <= 1.01
    assert error[(codes > 0) & (codes < 15)].max() <= 0.501
    assert len(np.unique(codes)) == 16
    out = np.zeros_like(w)
    launch(
        library, "affine_dequantize<float, 64, 4>", packed, scales, biases, out, threads=(w.size // 2, 1), group=(64, 1)
    )
    assert_within(out, back.astype(np.float64), 2 * EPS * (np.abs(codes * step) + np.abs(back)))
    bytes8 = RNG(12).integers(0, 256, 256).astype(np.uint8)
    s, b = RNG(13).uniform(0.01, 0.1, (2, 8)).astype(np.float16)
    halves = np.zeros(256, np.float16)
    launch(library, "affine_dequantize<half, 32, 8>", bytes8, s, b, halves, threads=(256, 1), group=(64, 1))
    wanted = bytes8 * np.repeat(s.astype(np.float64), 32) + np.repeat(b.astype(np.float64), 32)
    assert_within(halves, wanted, 2.0**-10 * np.abs(wanted))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _e4m3(code: np.ndarray) -> np.ndarray:
    exponent, fraction = (code >> 3) & 15, code & 7
    return np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))


FP = [
    f"{k}<{t}, {g}, 4, {rest}>"
    for t in ("float", "half", "bfloat")
    for g in (16, 32)
    for k, rest in (
        ("fp_qmv_fast", "false"),
        ("fp_qmv", "false"),
        ("fp_qmm_t", "false, false"),
        ("fp_dequantize", "false"),
    )
]


@pytest.mark.parametrize("metal", ["float", "half", "bfloat"])
@pytest.mark.parametrize("group", [16, 32])
def test_floating_four_bit(metal: str, group: int) -> None:
    header = "steel/gemm/gemm.h", "quantized_utils.h", "fp_quantized.h"
    library = mlx(header, [n for n in FP if n.split("<")[1].startswith(f"{metal}, {group},")])
    for kernel, K, N, M in (("fp_qmv_fast", 1024, 24, 2), ("fp_qmv", 352, 21, 2), ("fp_qmm_t", 128, 45, 40)):
        codes = RNG(14).integers(0, 16, (N, K))
        scales = (
            RNG(15).integers(40, 70, (N, K // group)) if group == 16 else RNG(15).integers(120, 130, (N, K // group))
        ).astype(np.uint8)
        factor = _e4m3(scales) if group == 16 else 2.0 ** (scales - 127.0)
        weight = E2M1[codes] * np.repeat(factor, group, 1)
        words = (codes.reshape(N, -1, 8) << (4 * np.arange(8))).sum(-1).astype(np.uint32)
        x = _store(RNG(16).normal(0, 1, (M, K)), metal)
        y = np.zeros((M, N), x.dtype)
        if kernel == "fp_qmm_t":
            launch(
                library,
                f"fp_qmm_t<{metal}, {group}, 4, false, false>",
                words,
                scales,
                UNUSED,
                x,
                y,
                K,
                N,
                M,
                *BATCH[:-1],
                groups=(-(-N // 32), -(-M // 32), 1),
                group=(32, 2, 2),
            )
        else:
            launch(library, f"{kernel}<{metal}, {group}, 4, false>", words, scales, UNUSED, x, y, K, N, *BATCH[:-1],
                   groups=(M, -(-N // 8), 1), group=(32, 2, 1))  # fmt: skip
        a = _load(x, metal)
        wanted = a @ weight.T
        assert_within(_load(y, metal), wanted, _bound(metal, wanted, a, weight.T))
    flat = codes.reshape(-1, 2)
    packed = (flat[:, 0] | flat[:, 1] << 4).astype(np.uint8)
    out = _store(np.zeros((N, K)), metal)
    launch(
        library,
        f"fp_dequantize<{metal}, {group}, 4, false>",
        packed,
        scales,
        UNUSED,
        out,
        threads=(packed.size, 1),
        group=(64, 1),
    )
    np.testing.assert_array_equal(_load(out, metal), weight)


@pytest.mark.parametrize("metal", ["float", "half", "bfloat"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_one_query_row(metal: str, causal: bool) -> None:
    off = dict.fromkeys(("has_mask", "query_transposed", "bool_mask", "float_mask", "has_sinks"), False)
    names = [f"sdpa_vector<{t}, 64>" for t in ("float", "half", "bfloat")]
    library = mlx(["sdpa_vector.h"], names, {**off, "do_causal": causal, "blocks": 1})
    heads, kv_heads, queries, n, d = 4, 2, 2, 77, 64
    q, k, v = (_store(RNG(17 + i).normal(0, 1, shape), metal) for i, shape in
               enumerate(((heads, queries, d), (kv_heads, n, d), (kv_heads, n, d))))  # fmt: skip
    out = np.zeros_like(q)
    stride = np.uint64(n * d), np.uint64(d)
    launch(library, f"sdpa_vector<{metal}, 64>", q, k, v, out, heads // kv_heads, n, *stride, *stride, 0.125,
           groups=(heads, queries, 1), group=(1024, 1, 1), perturb_seed=3)  # fmt: skip
    Q, K, V = (_load(x, metal) for x in (q, k, v))
    K, V = np.repeat(K, 2, 0), np.repeat(V, 2, 0)
    scores = 0.125 * Q @ K.transpose(0, 2, 1)
    if causal:
        scores = np.where(np.arange(n) <= n - queries + np.arange(queries)[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = p @ V / p.sum(-1, keepdims=True)
    weight = p / p.sum(-1, keepdims=True)
    bound = UNIT[metal] * np.abs(wanted) + 64 * EPS * (weight @ np.abs(V))
    assert_within(_load(out, metal), wanted, bound)
