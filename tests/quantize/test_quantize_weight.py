"""Tests quantize_weight with worked examples and a search for the nearest codes.

"mse" must never be worse than "rtn".
"""

import itertools

import numpy as np
import pytest
import torch
from allpairspy import AllPairs

from tests.support.reference import DTYPES, E2M1, FORMATS, e4m3, e8m0, to_numpy
from torch_marlin_metal.formats import NF4_VALUES
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.quantize import weight as quantize
from torch_marlin_metal.quantize.weight import quantize_weight
from torch_marlin_metal.repack import unpack_codes

FIXED_GROUP = {"nvfp4": 16, "mxfp4": 32}
GROUPS = [
    (name, size) for name in FORMATS for size in ([FIXED_GROUP[name]] if name in FIXED_GROUP else [16, 32, 128, -1])
]

VALUES = {
    "weight_format,group_size": GROUPS,
    "weight_format": FORMATS,
    "kind": ["normal", "one-sided", "outliers", "sparse", "tiny", "constant"],
    "method": ["rtn", "mse"],
    "scale_dtype": DTYPES,
    "dtype": DTYPES,
}
AXES = {
    "test_every_code_is_the_nearest": ("weight_format,group_size", "kind", "method"),
    "test_mse_is_never_worse_in_any_group": ("weight_format,group_size", "kind"),
    "test_dtypes": ("weight_format", "scale_dtype", "dtype"),
    "test_zeros_stay_zero": ("weight_format,group_size", "method"),
}


def weights(kind: str, N: int = 24, K: int = 200, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rng = np.random.default_rng([N, K])
    w = rng.standard_normal((N, K)) * 0.05
    if kind == "one-sided":
        w = np.abs(w) + 0.2
    elif kind == "outliers":
        w[:, ::37] *= 40
    elif kind == "sparse":
        w *= rng.random((N, K)) < 0.1
    elif kind == "tiny":
        w[1:] *= 1e-6  # so small that the scales of most groups become 0
    elif kind == "constant":
        w[:] = 0.3
    return torch.from_numpy(w).to(dtype)


def scales_of(packed: PackedWeight) -> np.ndarray:
    """Returns the scale of each weight in fp64 [K, N]."""
    stored = to_numpy(packed.scales)
    if packed.weight_format == "nvfp4":
        exact = e4m3(stored) * to_numpy(packed.global_scale)
        stored = exact.astype(np.float32).astype(np.float64)
    elif packed.weight_format == "mxfp4":
        stored = e8m0(stored)
    return stored[np.arange(packed.K) // packed.group_size]


def all_values(packed: PackedWeight) -> np.ndarray:
    """Returns the values of the 16 codes at each place in fp64 [16, K, N]."""
    q = np.arange(16.0)[:, None, None]
    s = scales_of(packed)
    zeros = (
        None if packed.zeros is None else to_numpy(packed.zeros).astype(float)[np.arange(packed.K) // packed.group_size]
    )
    if packed.weight_format == "uint4b8":
        return (q - 8) * s
    if packed.weight_format == "uint4":
        return (q - zeros) * s
    if packed.weight_format == "uint4_bias":
        return q * s + zeros
    table = to_numpy(packed.lut) if packed.weight_format == "lut4" else E2M1
    return table[:, None, None] * s


def values(packed: PackedWeight) -> np.ndarray:
    codes = unpack_codes(packed.b_packed).cpu().numpy()
    return np.take_along_axis(all_values(packed), codes[None].astype(np.int64), 0)[0]


def group_errors(packed: PackedWeight, w: torch.Tensor) -> np.ndarray:
    squares = (values(packed) - to_numpy(w).T) ** 2
    return np.add.reduceat(squares, np.arange(0, packed.K, packed.group_size), axis=0)


def pytest_generate_tests(metafunc):
    """Parametrizes the tests in AXES: all cases with --everything, otherwise few cases with all pairs of values."""
    axes = AXES.get(metafunc.function.__name__)
    if axes is None:
        return
    values = [*(VALUES[name] for name in axes), ["cpu", "mps"]]
    cases = itertools.product(*values) if metafunc.config.getoption("--everything") else AllPairs(values)
    flat = [(*group, *rest) if isinstance(group, tuple) else (group, *rest) for group, *rest in cases]
    names = ",".join([*axes, "one_device"])
    metafunc.parametrize(names, flat, indirect=["one_device"])


@pytest.fixture
def one_device(request):
    """Returns the device of one case; the fixture `device` would run each case on both devices."""
    return request.getfixturevalue("mps") if request.param == "mps" else request.param


def test_every_code_is_the_nearest(weight_format, group_size, kind, method, one_device):
    w = weights(kind)
    packed = quantize_weight(w.to(one_device), weight_format, group_size, method).validate()
    exact = to_numpy(w).T
    error = np.abs(values(packed) - exact)
    least = np.abs(all_values(packed) - exact).min(0)
    # If two codes are almost equally near, the fp32 rounding of x / s can decide between them.
    assert (error <= least + 2.0**-20 * (np.abs(scales_of(packed)) + np.abs(exact))).all()


def test_mse_is_never_worse_in_any_group(weight_format, group_size, kind, one_device):
    w = weights(kind).to(one_device)
    rtn = group_errors(quantize_weight(w, weight_format, group_size, "rtn"), w)
    mse = group_errors(quantize_weight(w, weight_format, group_size, "mse"), w)
    assert (mse <= rtn).all()
    if kind == "normal":
        assert mse.sum() < 0.97 * rtn.sum()


def test_dtypes(weight_format, scale_dtype, dtype, one_device):
    packed = quantize_weight(
        weights("normal", dtype=dtype).to(one_device), weight_format, scale_dtype=scale_dtype
    ).validate()
    coded = weight_format in FIXED_GROUP
    assert packed.scales.dtype == (torch.uint8 if coded else scale_dtype)
    if weight_format == "uint4_bias":
        assert packed.zeros.dtype == scale_dtype
    assert packed.b_packed.device.type == one_device
    assert packed.group_size == FIXED_GROUP.get(weight_format, 128)
    assert np.abs(values(packed) - to_numpy(weights("normal", dtype=dtype)).T).max() < 0.04


def test_rtn_scales_follow_the_conventions_of_each_format(device):
    w = weights("normal", K=128).to(device)
    amax, low, high = w.abs().amax(1), w.amin(1), w.amax(1)

    def scale(weight_format):
        return quantize_weight(w, weight_format, 128, scale_dtype=torch.float32).scales[0]

    torch.testing.assert_close(scale("uint4b8"), amax / 7.5)
    torch.testing.assert_close(scale("uint4"), (high - low) / 15)
    torch.testing.assert_close(scale("uint4_bias"), (high - low) / 15)
    torch.testing.assert_close(scale("float4_e2m1"), amax / 6)
    torch.testing.assert_close(scale("nf4"), amax)


def test_uint4_zero_points_keep_zero_exact(device):
    w = weights("sparse").to(device)
    packed = quantize_weight(w, "uint4", 32)
    assert packed.zeros.dtype == torch.uint8
    assert (values(packed)[to_numpy(w).T == 0] == 0).all()


def test_zeros_stay_zero(weight_format, group_size, method, one_device):
    packed = quantize_weight(torch.zeros(3, 40, device=one_device), weight_format, group_size, method).validate()
    assert (packed.dequantize() == 0).all()
    code = {"uint4b8": 8, "lut4": NF4_VALUES.index(0.0)}.get(weight_format, 0)
    assert (unpack_codes(packed.b_packed) == code).all()


def test_a_scale_that_rounds_to_zero_gives_zeros(device):
    w = torch.full((2, 64), 1e-8, device=device)
    w[:, 32:] = 1
    assert (unpack_codes(quantize_weight(w, "uint4b8", 32).b_packed)[:32] == 8).all()
    assert quantize_weight(w, "uint4b8", 32, scale_dtype=torch.float32).dequantize().min() > 0


def test_nvfp4_worked_example(device):
    # The first weight is 0.301 and not 0.3, because 0.3 is 0.75 scales, exactly between two codes. The rounding of the
    # scale would then decide.
    row = [0.301, -0.7, 0.05, 1.2, -2.4, 0.9, 0, -0.02, 0.11, 0.5, -0.33, 1.9, -1.1, 0.61, 0.26, -0.15]
    w = torch.tensor([row, [4.8] + [0.0] * 15], device=device)
    packed = quantize_weight(w, "nvfp4")
    assert packed.global_scale.item() == pytest.approx(1 / 560, rel=1e-6)
    assert packed.scales[0, 0].item() == 0x76
    assert [f"{word & 0xFFFFFFFF:08X}" for word in packed.b_packed[:, 0].tolist()] == ["804F50B2", "913D6A21"]
    expected = [0.4, -0.6, 0, 1.2, -2.4, 0.8, 0, 0, 0.2, 0.4, -0.4, 1.6, -1.2, 0.6, 0.2, -0.2]
    np.testing.assert_allclose(packed.dequantize()[:, 0].tolist(), expected, atol=1e-6)


def test_mxfp4_worked_example(device):
    w = torch.zeros(1, 32, device=device)
    w[0, :4] = torch.tensor([3.5, -7, 0.4, 1])
    packed = quantize_weight(w, "mxfp4")
    assert packed.scales[0, 0].item() == 0x7F
    assert packed.b_packed[0, 0].item() == 0x21F6
    assert packed.dequantize()[:4, 0].tolist() == [4, -6, 0.5, 1]


@pytest.mark.parametrize(
    ("rounding", "exponents"),
    [("floor", [0, 0, 0, 0, 0, 1]), ("even", [0, 0, 0, 1, 1, 1]), ("rceil", [0, 0, 1, 1, 1, 1])],
)
def test_mxfp4_exponents(rounding, exponents, device):
    w = torch.zeros(6, 32, device=device)
    w[:, 5] = torch.tensor([4, 5.9, 6.1, 7, 7.99, 8])
    packed = quantize_weight(w, "mxfp4", mx_rounding=rounding)
    assert (packed.scales[0].int() - 127).tolist() == exponents


def test_mxfp4_exponents_at_powers_of_two(device):
    powers = 2.0 ** torch.arange(-40, 41)
    below = torch.nextafter(powers, torch.zeros(()))
    w = torch.zeros(162, 32, device=device)
    w[:, 3] = torch.cat([powers, below]).to(device)
    floor = (quantize_weight(w, "mxfp4").scales[0].int() - 127).tolist()
    assert floor == [*range(-42, 39), *range(-43, 38)]
    w[:, 3] = torch.cat([6 * powers, torch.nextafter(6 * powers, torch.full((), torch.inf))]).to(device)
    rceil = (quantize_weight(w, "mxfp4", mx_rounding="rceil").scales[0].int() - 127).tolist()
    assert rceil == [*range(-40, 41), *range(-39, 42)]


def test_e2m1_ties_go_to_even(device):
    magnitudes = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 5.5, 6]
    w = torch.tensor([magnitudes, [-float(x) for x in magnitudes]], device=device)
    packed = quantize_weight(w, "float4_e2m1", 16)
    codes = unpack_codes(packed.b_packed)
    assert codes[:, 0].tolist() == [0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 7]
    assert codes[:, 1].tolist() == [8 | code for code in codes[:, 0].tolist()]


def test_custom_table(device):
    lut = torch.tensor([3.0, -1, 0.5, 7, -4, 2, 1, -7, 0, 5, -2, 4, -3, 6, -5, -6], device=device)
    w = weights("normal").to(device)
    packed = quantize_weight(w, "lut4", 64, "mse", lut=lut).validate()
    assert torch.equal(packed.lut, lut)
    error = np.abs(values(packed) - to_numpy(w).T)
    assert (error <= np.abs(all_values(packed) - to_numpy(w).T).min(0) + 1e-7).all()


def test_nf4_is_lut4_with_its_table(device):
    w = weights("normal").to(device)
    packed = quantize_weight(w, "nf4", 64)
    assert packed.weight_format == "lut4"
    assert packed.lut.tolist() == pytest.approx(NF4_VALUES)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_chunks_do_not_change_the_result(weight_format, monkeypatch, device):
    w = weights("outliers", N=29).to(device)
    whole = quantize_weight(w, weight_format, None, "mse")
    monkeypatch.setattr(quantize, "CHUNK_ELEMENTS", 3 * w.shape[1])
    parts = quantize_weight(w, weight_format, None, "mse")
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, parts.tensors()[name]), name


def test_non_contiguous_and_grad_requiring_weights(device):
    w = weights("normal").to(device)
    packed = quantize_weight(w, "uint4", 32)
    other = quantize_weight(w.T.contiguous().T.requires_grad_(), "uint4", 32)
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in packed.tensors().items())
    assert not other.scales.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"w": [[0.0] * 8]}, r"w: expected a tensor, got list"),
        ({"w": None}, r"w: expected a tensor, got NoneType"),
        ({"w": torch.zeros(4, 12)}, r"w: expected \[N, K\] with K a multiple of 8, got shape \[4, 12\]"),
        ({"w": torch.zeros(8)}, r"w: expected \[N, K\].*, got shape \[8\]"),
        ({"w": torch.zeros(0, 8)}, r"w: expected \[N, K\].*, got shape \[0, 8\]"),
        ({"w": torch.zeros(4, 8, dtype=torch.float64)}, r"w: expected float16, bfloat16 or float32, got torch.float64"),
        ({"w": torch.zeros(4, 8, dtype=torch.int32)}, r"w: expected .*, got torch.int32"),
        ({"w": torch.zeros(4, 8, device="meta")}, r"w: expected a tensor with data"),
        ({"w": torch.tensor([[0.0] * 7 + [float("nan")]])}, r"w: expected finite weights, got values from nan to nan"),
        (
            {"w": torch.tensor([[0.0] * 7 + [float("-inf")]])},
            r"w: expected finite weights, got values from -inf to 0.0",
        ),
        ({"method": "gptq"}, r"method: expected 'rtn' or 'mse', got 'gptq'"),
        ({"group_size": 24}, r"group_size: expected one of 16, 32, 64, 128, 256, or K = 64 for uint4b8, got 24"),
        ({"weight_format": "nvfp4", "group_size": 32}, r"group_size: expected 16 for nvfp4, got 32"),
        ({"scale_dtype": torch.float64}, r"scale_dtype: expected float16, bfloat16 or float32, got torch.float64"),
        ({"lut": torch.zeros(16)}, r"lut: expected None for uint4b8"),
        ({"weight_format": "lut4", "lut": [0.0] * 16}, r"lut: expected float32 \[16\], got list"),
        ({"weight_format": "lut4", "lut": torch.zeros(8)}, r"lut: expected float32 \[16\], got torch.float32 \[8\]"),
        ({"weight_format": "lut4", "lut": torch.zeros(16)}, r"lut: expected finite values, not all of them 0"),
        ({"amax": 1.0}, r"amax: expected None for uint4b8, got 1.0"),
        (
            {"w": torch.full((4, 64), 0.5), "weight_format": "nvfp4", "amax": 0.25},
            r"amax: expected a finite number of at least 0.5, got 0.25",
        ),
        ({"weight_format": "nvfp4", "amax": float("nan")}, r"amax: expected a finite number of at least 0, got nan"),
        ({"mx_rounding": "up"}, r"mx_rounding: expected one of floor, even, rceil, got 'up'"),
        ({"w": torch.full((4, 8), 1e6)}, r"scale_dtype: the largest scale of this weight became inf in torch.float16"),
        (
            {"w": torch.full((4, 8), 3e38), "scale_dtype": torch.float32},
            r"scale_dtype: the largest scale .* expected at most 2\^100",
        ),
        (
            {"w": torch.full((4, 8), 1e6), "weight_format": "uint4_bias"},
            r"scale_dtype: the largest (scale|bias) .* in torch.float16",
        ),
        (
            {"w": torch.full((4, 8), 3e38), "weight_format": "mxfp4"},
            r"w: expected a largest value of 4 \* 2\^-111 to 6 \* 2\^113 for mxfp4",
        ),
    ],
)
def test_refusals(arguments, message):
    arguments = {"w": torch.zeros(4, 64), "weight_format": "uint4b8", **arguments}
    with pytest.raises(ValueError, match="quantize_weight: " + message):
        quantize_weight(**arguments)


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_weights_with_a_common_global_scale_have_the_bits_of_one_weight(method):
    w = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 0, 24)[:, None]
    whole, largest = quantize_weight(w, "nvfp4", method=method), float(w.abs().max())
    first = quantize_weight(w[:8], "nvfp4", method=method, amax=largest)
    assert torch.equal(first.b_packed, whole.b_packed[:, :8]) and torch.equal(first.scales, whole.scales[:, :8])
    assert torch.equal(first.global_scale, whole.global_scale)
    assert not torch.equal(quantize_weight(w[:8], "nvfp4", method=method).global_scale, whole.global_scale)


def test_unknown_format_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"weight_format: expected one of uint4b8, .*got 'int3'"):
        quantize_weight(torch.zeros(4, 64), "int3")
