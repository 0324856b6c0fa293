"""Tests the unmodified Metal headers of the installed PyTorch (c10/metal) in kernels such as users write."""

from pathlib import Path

import numpy as np
import pytest
import torch
from mlx_kernels import assert_within, launch
from msl_kernels import HEADER, Library, device, from_bfloat, to_bfloat

INCLUDE = Path(torch.__file__).parent / "include"
if not (INCLUDE / "c10" / "metal" / "utils.h").exists():
    pytest.skip("the installed torch has no c10/metal headers", allow_module_level=True)
RNG = np.random.default_rng
EPS = 2.0**-23
MAX_DIM = 16


def _library(headers: list[str], source: str) -> Library:
    text = HEADER + "".join(f"#include <c10/metal/{h}.h>\n" for h in headers) + source
    return device.compile(text, include_paths=[str(INCLUDE)])


# For each function of c10::metal: a reference in double, the range of inputs, the relative bound in units of EPS, and
# the absolute bound. A bound is the sum of two errors: the error of PyTorch's approximation in single precision, and
# Metal's limit for the precise:: functions that it calls.
SPECIAL = {
    "erf": (torch.erf, (-4, 4), 8, 2e-7),
    "erfc": (torch.erfc, (-2, 3), 24, 2e-7),
    "erfinv": (torch.erfinv, (-0.95, 0.95), 24, 1e-7),
    "i0": (torch.special.i0, (-8, 8), 24, 0),
    "i0e": (torch.special.i0e, (-8, 8), 16, 0),
    "i1": (torch.special.i1, (-8, 8), 32, 1e-6),
    "i1e": (torch.special.i1e, (-8, 8), 32, 1e-6),
    "log_gamma": (torch.lgamma, (3, 30), 48, 2e-6),
    "digamma": (torch.digamma, (2, 30), 48, 1e-6),
    "trigamma": (lambda x: torch.polygamma(1, x), (1, 20), 48, 0),
    "sinc": (torch.sinc, (-3, 3), 16, 1e-6),
    "entr": (torch.special.entr, (0.1, 5), 16, 1e-6),
    "spherical_bessel_j0": (torch.special.spherical_bessel_j0, (1, 9), 16, 1e-6),
    "bessel_j0_forward": (torch.special.bessel_j0, (0, 4), 16, 1e-6),
    "modified_bessel_k0_forward": (torch.special.modified_bessel_k0, (0.5, 9), 64, 1e-6),
    "log1p": (torch.log1p, (-0.4, 50), 16, 1e-7),
}


def test_special_functions_through_torchs_own_kernels() -> None:
    functors = "".join(
        f"struct {n}_functor {{ template <typename T> T operator()(const T x) {{"
        f" return static_cast<T>(c10::metal::{n}(x)); }} }};\n"
        f"REGISTER_UNARY_OP({n}, float, float);\n"
        for n in SPECIAL
    )
    library = _library(["indexing", "special_math"], functors)
    for name, (reference, bounds, ulps, absolute) in SPECIAL.items():
        x = RNG(1).uniform(*bounds, 1003).astype(np.float32)
        wanted = reference(torch.from_numpy(x).double()).numpy()
        bound = ulps * EPS * np.abs(wanted) + absolute
        y = np.zeros_like(x)
        for seed in (0, 3):
            launch(library, f"{name}_dense_scalar_float_float", y, x, threads=x.size, group=256, perturb_seed=seed)
            assert_within(y, wanted, bound)
        z = np.zeros_like(x)
        launch(
            library,
            f"{name}_dense_float_float",
            z,
            x,
            np.uint32(x.size),
            threads=-(-x.size // 4),
            group=64,
            perturb_seed=3,
        )
        np.testing.assert_array_equal(z, y)


def test_strided_kernels() -> None:
    source = """
struct neg_functor { template <typename T> T operator()(const T x) { return -x; } };
REGISTER_UNARY_OP(neg, half, half); REGISTER_UNARY_OP(neg, bfloat, bfloat); REGISTER_UNARY_OP(neg, int, int);
"""
    library = _library(["indexing"], source)
    for metal, x in (
        ("half", RNG(2).normal(0, 1, (5, 6, 7)).astype(np.float16)),
        ("int", RNG(3).integers(-99, 99, (5, 6, 7)).astype(np.int32)),
        ("bfloat", to_bfloat(RNG(4).normal(0, 1, (5, 6, 7)))),
    ):
        out = np.zeros((7, 5, 6), x.dtype)
        sizes, strides, out_strides = (np.zeros(MAX_DIM, np.int64) for _ in range(3))
        sizes[:3], strides[:3] = x.shape[::-1], x.strides[::-1]
        out_strides[:3] = (out.strides[0], out.strides[2], out.strides[1])
        launch(
            library,
            f"neg_strided_{metal}_{metal}",
            out,
            x,
            sizes,
            strides,
            out_strides,
            np.uint32(3),
            threads=(7, 30),
            group=(7, 2),
        )
        turned = x.transpose(2, 0, 1)
        np.testing.assert_array_equal(out, turned ^ 0x8000 if metal == "bfloat" else -turned)


# A reduction like those that Inductor generates: one threadgroup, which passes threadgroup memory to c10::metal.
REDUCTION = """
kernel void k_{name}(device {out}* out, constant {metal}* in, uint2 i [[thread_position_in_grid]],
    uint2 l [[thread_position_in_threadgroup]]) {{
  threadgroup {acc} acc[32];
  auto value = static_cast<{metal}>(in[i.x]);
  auto result = c10::metal::threadgroup_{op}(acc, value, l.x, {size});
  if (l.x == 0) out[0] = static_cast<{out}>(result);
}}
"""


# PyTorch's 64-bit reduction reads lanes that may be inactive, as its header says. The result is right only if all 32
# lanes of a simdgroup are active. If the size leaves some lanes inactive, the test therefore skips 64-bit types.
@pytest.mark.parametrize("size", [1, 31, 32, 256, 1000, 1024])
def test_reductions_over_a_threadgroup(size: int) -> None:
    cases = [
        ("float", "float", "sum"),
        ("float", "float", "prod"),
        ("float", "float", "max"),
        ("float", "float", "min"),
        ("half", "float", "sum"),
        ("int", "int", "sum"),
        ("long", "long", "sum"),
        ("long", "long", "max"),
        ("short", "short", "min"),
        ("bfloat", "float", "sum"),
    ]
    source = "".join(REDUCTION.format(name=f"{m}_{o}", metal=m, out=a, acc=a, op=o, size=size) for m, a, o in cases)
    library = _library(["reduction_utils"], source)
    dtypes = {
        "float": np.float32,
        "half": np.float16,
        "int": np.int32,
        "long": np.int64,
        "short": np.int16,
        "bfloat": np.uint16,
    }
    for metal, acc, op in cases:
        if metal == "long" and size not in (32, 1024):
            continue
        if metal in ("long", "short", "int"):
            x = RNG(5).integers(-(1 << 14), 1 << 14, size).astype(dtypes[metal]) << (20 if metal == "long" else 0)
            value = x
        else:
            value = RNG(6).uniform(0.95, 1.06, size).astype(np.float32)
            x = to_bfloat(value) if metal == "bfloat" else value.astype(dtypes[metal])
            value = (from_bfloat(x) if metal == "bfloat" else x).astype(np.float64)
        out = np.zeros(1, dtypes[acc])
        launch(library, f"k_{metal}_{op}", out, x, threads=size, group=size)
        wanted = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}[op](value)
        assert_within(
            out,
            np.array([wanted]),
            0 if metal in ("int", "long", "short") or op in ("max", "min") else size * EPS * abs(wanted),
        )


def test_nan_and_argmax() -> None:
    source = """
kernel void k(device float* out, device uint* where, constant float* in, uint i [[thread_position_in_grid]]) {
  threadgroup float values[32]; threadgroup uint places[32];
  float most = c10::metal::threadgroup_max(values, in[i], i, 96u);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint place = c10::metal::threadgroup_argmax(values, places, in[i], i, i, 96u);
  if (i == 0) { out[0] = most; where[0] = place; }
}"""
    library = _library(["reduction_utils"], source)
    x = RNG(7).permutation(96).astype(np.float32)
    out, where = np.zeros(1, np.float32), np.zeros(1, np.uint32)
    launch(library, "k", out, where, x, threads=96, group=96)
    assert (out[0], where[0]) == (95, x.argmax())
    x[41] = np.nan
    launch(library, "k", out, where, x, threads=96, group=96)
    assert np.isnan(out[0])
    assert where[0] == 41


def test_welford() -> None:
    source = """
kernel void k(device float* out, constant float* in, uint i [[thread_position_in_grid]]) {
  threadgroup float values[128]; values[i] = in[i];
  auto w = c10::metal::threadgroup_welford_reduce(values, 128u);
  threadgroup float3 parts[2]; if (i < 2) parts[i] = w;
  auto both = c10::metal::threadgroup_welford_combine(parts, 2u);
  if (i == 0) { for (int j = 0; j < 3; ++j) { out[j] = w[j]; out[3 + j] = both[j]; } }
}"""
    library = _library(["reduction_utils"], source)
    x, out = RNG(8).normal(3, 2, 128).astype(np.float32), np.zeros(6, np.float32)
    launch(library, "k", out, x, threads=128, group=128)
    exact = x.astype(np.float64)
    m2 = ((exact - exact.mean()) ** 2).sum()
    np.testing.assert_allclose(out, [exact.mean(), m2, 128, exact.mean(), 2 * m2, 256], rtol=128 * EPS)


def _philox(seed: int, index: int) -> np.ndarray:
    """Computes Philox 4x32-10 (Salmon et al. 2011) with key `seed` and counter (0, 0, high and low word of `index`)."""
    mask = 0xFFFFFFFF
    c = [0, 0, index >> 32, index & mask]
    k = [seed >> 32, seed & mask]
    for _ in range(9):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & mask, (p >> 32) ^ c[3] ^ k[1], p & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return np.array(c, np.uint32)


def test_random_numbers() -> None:
    source = """
kernel void k(device uint4* bits, device float* uniform, device float* normal, constant long& seed,
    uint i [[thread_position_in_grid]]) {
  bits[i] = c10::metal::philox4::rand(seed, i); uniform[i] = c10::metal::rand(seed, i);
    normal[i] = c10::metal::randn(seed, i);
}"""
    library = _library(["random"], source)
    n = 2000
    bits, uniform, normal = np.zeros((n, 4), np.uint32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    seed = 0x123456789ABCDEF
    launch(library, "k", bits, uniform, normal, np.int64(seed), threads=n, group=250)
    wanted = np.stack([_philox(seed, i) for i in range(n)])
    np.testing.assert_array_equal(bits, wanted)
    np.testing.assert_array_equal(uniform, (bits[:, 0] & 0x7FFFFFFF).astype(np.float32) * np.float32(4.6566127342e-10))
    assert abs(normal.mean()) < 0.1
    assert abs(normal.std() - 1) < 0.05


def test_integer_and_float_division_rules() -> None:
    source = """
kernel void k(device int* q, device int* r, device float* f, constant int* a, constant int* b, constant float* x,
    constant float* y,
              uint i [[thread_position_in_grid]]) {
  q[i] = c10::metal::floor_divide(a[i], b[i]); r[i] = c10::metal::remainder(a[i], b[i]);
  f[i] = c10::metal::remainder(x[i], y[i]); f[i + 64] = c10::metal::floor_divide(x[i], y[i]);
    f[i + 128] = c10::metal::fmod(x[i], y[i]);
  f[i + 192] = c10::metal::pow(a[i] % 7, abs(b[i]) % 9); f[i + 256] = c10::metal::max(x[i], i == 5 ? NAN : y[i]);
}"""
    library = _library(["utils"], source)
    a, b = RNG(9).integers(-100, 100, (2, 64)).astype(np.int32)
    b[b == 0] = 7
    x, y = RNG(10).normal(0, 9, (2, 64)).astype(np.float32)
    q, r, f = np.zeros(64, np.int32), np.zeros(64, np.int32), np.zeros((5, 64), np.float32)
    launch(library, "k", q, r, f, a, b, x, y, threads=64, group=64)
    np.testing.assert_array_equal(q, a // b)
    np.testing.assert_array_equal(r, a % b)
    np.testing.assert_array_equal(f[1], np.floor(x / y))
    assert_within(f[0], x - y.astype(np.float64) * np.floor(x / y), EPS * (np.abs(x) + np.abs(y)))
    np.testing.assert_array_equal(f[2], np.fmod(x, y))
    np.testing.assert_array_equal(f[3], np.fmod(a, 7).astype(np.float64) ** (np.abs(b) % 9))
    np.testing.assert_array_equal(f[4], np.where(np.arange(64) == 5, np.nan, np.maximum(x, y)))


@pytest.mark.parametrize("metal", ["float", "half", "bfloat", "int", "short", "char", "long"])
def test_atomic_add_of_every_type(metal: str) -> None:
    source = f"""
kernel void k(device c10::metal::AtomicType_t<{metal}>* out, constant {metal}* in, constant int* where,
    uint i [[thread_position_in_grid]]) {{
  c10::metal::AtomicType<{metal}>::atomic_add(out, where[i], in[i]);
}}"""
    library = _library(["atomic"], source)
    dtypes = {
        "float": np.float32,
        "half": np.float16,
        "bfloat": np.uint16,
        "int": np.int32,
        "short": np.int16,
        "char": np.int8,
        "long": np.int64,
    }
    where = RNG(11).integers(0, 8, 200).astype(np.int32)
    values = RNG(12).integers(-3, 4, 200)
    x = to_bfloat(values.astype(np.float32)) if metal == "bfloat" else values.astype(dtypes[metal])
    if metal == "long":
        x = x * (1 << 33)
    out = np.zeros(8, dtypes[metal])
    launch(library, "k", out, x, where, threads=200, group=100)
    got = from_bfloat(out) if metal == "bfloat" else out
    np.testing.assert_array_equal(got, np.bincount(where, values, 8) * ((1 << 33) if metal == "long" else 1))
