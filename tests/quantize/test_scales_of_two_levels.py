"""Scales of two levels from quantize_weight decode to the nearest levels, with fewer bits and smaller errors."""

import numpy as np
import pytest
import torch

from torch_marlin_metal import PackedWeight, quantize_weight


def rows(kind: str, N: int = 48, K: int = 1024) -> torch.Tensor:
    torch.manual_seed(0)
    heavy = torch.distributions.StudentT(3.0).sample((N, K))
    return {"gauss": torch.randn(N, K), "heavy": heavy, "above 0": torch.rand(N, K) + 0.5}[kind] * 0.02


def levels(packed: PackedWeight) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale and the bias of each weight, computed with NumPy in fp64 `[K, N]`."""
    k = np.arange(packed.K)
    group, block = k // packed.group_size, k // 256
    scales = packed.scales.numpy()[group].astype(np.float64) * packed.super_scales.numpy()[block].astype(np.float64)
    if packed.super_zeros is None:
        offset = 8.0 if packed.zeros is None else packed.zeros.numpy()[group].astype(np.float64)
        return scales, -offset * scales
    return scales, packed.zeros.numpy()[group] * packed.super_zeros.numpy()[block].astype(np.float64)


def codes(packed: PackedWeight) -> np.ndarray:
    words, shifts = packed.b_packed.numpy().view(np.uint32), np.arange(0, 32, 4, dtype=np.uint32)
    return ((words[:, None] >> shifts[None, :, None]) & 15).reshape(packed.K, packed.N).astype(np.int64)


def bits(packed: PackedWeight) -> float:
    return 8 * sum(tensor.nbytes for tensor in packed.tensors().values()) / (packed.K * packed.N)


CASES = [("q4_k", None, None), ("uint4b8", 16, True), ("uint4", 64, True)]


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize(("name", "group_size", "two_levels"), CASES)
def test_every_weight_has_the_code_of_the_nearest_level(name, group_size, two_levels, method) -> None:
    w = rows("gauss", 9, 328)  # a short group and a short block
    packed = quantize_weight(w, name, group_size, method, two_levels=two_levels).validate()
    scale, bias = levels(packed)
    found, exact = codes(packed), w.numpy().astype(np.float64).T
    decoded = found * scale + bias
    np.testing.assert_allclose(packed.dequantize().numpy(), decoded, rtol=1e-5, atol=1e-8)
    for step in (-1, 1):
        other = np.clip(found + step, 0, 15) * scale + bias
        assert (np.abs(decoded - exact) <= np.abs(other - exact) + 1e-7).all()
    assert np.abs(decoded - exact).max() < np.abs(exact).max() / 8


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("kind", ["gauss", "heavy"])
def test_q4_k_has_fewer_bits_and_less_error_than_zero_points(kind, method) -> None:
    w = rows(kind)
    plain, packed = quantize_weight(w, "uint4", 32, method), quantize_weight(w, "q4_k", method=method)
    assert (packed.weight_format, packed.group_size) == ("uint4_bias", 32)
    assert (bits(plain), bits(packed)) == (4.75, 4.625)
    errors = [float((one.dequantize().T - w).norm() / w.norm()) for one in (plain, packed)]
    assert errors[1] < errors[0] * (0.995 if method == "rtn" else 0.95)


def test_blocks_without_negative_weights_or_without_any() -> None:
    w = rows("above 0", 8, 512)
    w[:, 256:] = 0
    packed = quantize_weight(w, "q4_k").validate()
    assert not packed.zeros.any()
    back = packed.dequantize().T
    assert not back[:, 256:].any()
    assert (back - w).abs().max() <= w.max() / 15


def test_rounding_the_scales_costs_little() -> None:
    w = rows("gauss")
    for name, group_size in (("uint4_bias", 32), ("uint4b8", 16), ("uint8b128", 64)):
        errors = [
            float((quantize_weight(w, name, group_size, two_levels=two).dequantize().T - w).norm())
            for two in (False, True)
        ]
        assert errors[1] < errors[0] * 1.005


def test_what_cannot_have_two_levels_is_refused() -> None:
    with pytest.raises(ValueError, match="quantize_weight: two_levels: expected False for nvfp4"):
        quantize_weight(rows("gauss"), "nvfp4", two_levels=True)
    with pytest.raises(ValueError, match="two_levels: expected groups of at most 256, got 1024"):
        quantize_weight(rows("gauss"), "uint4", -1, two_levels=True)
    with pytest.raises(ValueError, match=r"scale_dtype: the largest scale .* use a wider scale_dtype"):
        quantize_weight(rows("gauss") * 1e-6, "q4_k")
    quantize_weight(rows("gauss") * 1e-6, "q4_k", scale_dtype=torch.float32)
