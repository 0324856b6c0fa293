"""torchao's packed int4 classes and ModelOpt's W4A16_AWQ: layers written in plain NumPy from the documented layouts."""

import numpy as np
import pytest
import torch

from tests.support.checkpoint_writers import LAYER, random_codes, random_floats, save, words
from torch_marlin_metal.convert import CheckpointError, UnsupportedFormat, open_reader, read_layers

TORCHAO = {"quant_method": "torchao"}


def one(path, **options):
    (layer,) = read_layers(path, **options)
    return layer


def signed_pairs(codes: np.ndarray) -> np.ndarray:
    """Packs signed codes `[N, K]` like FBGEMM's pack_int4, with even k in the low nibble."""
    return ((codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)).astype(np.int8)


def tiles(codes: np.ndarray) -> np.ndarray:
    """Packs codes `[N, K]` in the layout of CUDA's _convert_weight_to_int4pack with 8 inner tiles, word by word."""
    N, K = codes.shape
    out = np.zeros((N // 8, K // 128, 32, 4), dtype=np.uint32)
    for row_tile, k_tile, lane, inner in np.ndindex(out.shape):
        row, base = row_tile * 8 + lane // 4, k_tile * 128 + inner * 32 + 2 * (lane % 4)
        v = [int(codes[row, base + at]) for at in (0, 1, 8, 9, 16, 17, 24, 25)]
        for nibble, index in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out[row_tile, k_tile, lane, inner] |= np.uint32(v[index] << (4 * nibble))
    return out.view(np.int32)


def write_torchao(path, kind: str, parts: dict, **attributes) -> None:
    config = {"quantization_config": TORCHAO, "tensor_attributes": {"class": kind, **attributes}}
    save(path, {f"{LAYER}.weight.{name}": tensor for name, tensor in parts.items()}, config)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64])
def test_int4_tensor(symmetric, group_size, tmp_path) -> None:
    rng, K, N = np.random.default_rng(0), 192, 40
    codes, scales = random_codes(rng, N, K) - 8, random_floats(rng, (K // group_size, N), "bf16")
    zeros = torch.zeros_like(scales) if symmetric else (scales * 3 + 0.0625).bfloat16()
    parts = {"qdata": signed_pairs(codes), "scale": scales, "zero_point": zeros}
    write_torchao(tmp_path, "Int4Tensor", parts, block_size=f"[1, {group_size}]")
    layer = one(tmp_path)
    assert layer.weight_format == ("uint4b8" if symmetric else "uint4_bias")
    groups = np.arange(K) // group_size
    exact = codes * scales.double().numpy().T[:, groups] + zeros.double().numpy().T[:, groups]
    assert np.array_equal(layer.dequantize().T.numpy(), exact.astype(np.float32))


@pytest.mark.parametrize(("N", "K"), [(40, 384), (36, 200)])  # the second shape is padded
def test_tiles_of_a_gpu(N, K, tmp_path) -> None:
    rng, group_size, padded = np.random.default_rng(1), 32, (-(-N // 8) * 8, -(-K // 128) * 128)
    codes = random_codes(rng, *padded)
    scales = random_floats(rng, (padded[1] // group_size, padded[0]), "bf16")
    zeros = (scales * 2 - 0.03125).bfloat16()
    parts = {"qdata": tiles(codes), "scale_and_zero": torch.stack((scales, zeros), 2)}
    attributes = {"block_size": f"[1, {group_size}]", "shape": f"torch.Size([{N}, {K}])"}
    write_torchao(tmp_path, "Int4TilePackedTo4dTensor", parts, **attributes)
    with pytest.warns(UserWarning, match="as an NVIDIA GPU writes it"):
        layer = one(tmp_path)
    assert (layer.N, layer.K, layer.weight_format) == (N, K, "uint4_bias")
    groups = np.arange(padded[1]) // group_size
    exact = (codes - 8) * scales.double().numpy().T[:, groups] + zeros.double().numpy().T[:, groups]
    assert np.array_equal(layer.dequantize().T.numpy(), exact[:N, :K].astype(np.float32))
    write_torchao(tmp_path, "Int4TilePackedTo4dTensor", parts, **attributes | {"shape": f"[{N + 8}, {K}]"})
    with pytest.raises(CheckpointError, match=r"qdata.*expected tiles for a weight of"):
        one(tmp_path)
    write_torchao(tmp_path, "Int4TilePackedTo4dTensor", parts, block_size="[1, 32]")
    with pytest.raises(UnsupportedFormat, match="its shape is not stated"):
        one(tmp_path)


@pytest.mark.parametrize("symmetric", [True, False])
def test_words_of_an_intel_gpu(symmetric, tmp_path) -> None:
    rng, K, N, group_size = np.random.default_rng(2), 192, 24, 64
    codes, scales = random_codes(rng, N, K), random_floats(rng, (K // group_size, N), "fp16")
    zeros = np.full((K // group_size, N), 8) if symmetric else rng.integers(0, 16, (K // group_size, N))
    parts = {"qdata": words(codes, 1), "scale": scales, "zero_point": zeros.astype(np.int8)}
    write_torchao(tmp_path, "Int4PlainInt32Tensor", parts, block_size="[1, 64]")
    layer = one(tmp_path)
    assert layer.weight_format == ("uint4b8" if symmetric else "uint4")
    groups = np.arange(K) // group_size
    exact = (codes - zeros.T[:, groups]) * scales.double().numpy().T[:, groups]
    assert np.array_equal(layer.dequantize().T.numpy(), exact.astype(np.float32))
    write_torchao(tmp_path, "Int4PlainInt32Tensor", parts | {"zero_point": scales.clone()}, block_size="[1, 64]")
    with pytest.raises(UnsupportedFormat, match="its zero points are floating"):
        one(tmp_path)
    wrong = parts | {"zero_point": (zeros - 9).astype(np.int8)}
    write_torchao(tmp_path, "Int4PlainInt32Tensor", wrong, block_size="[1, 64]")
    with pytest.raises(CheckpointError, match=r"zero_point.*expected zero points in 0..15"):
        one(tmp_path)


def test_a_bias_that_fp32_cannot_hold_is_refused_or_decoded(tmp_path) -> None:
    rng, K, N = np.random.default_rng(3), 64, 16
    codes, scales = random_codes(rng, N, K) - 8, torch.full((1, N), 1.0039, dtype=torch.float32)
    zeros = torch.full((1, N), 2.0**-20 * 1.0001, dtype=torch.float32)
    parts = {"qdata": signed_pairs(codes), "scale": scales, "zero_point": zeros}
    write_torchao(tmp_path, "Int4Tensor", parts, block_size="[1, 64]")
    with pytest.raises(UnsupportedFormat, match="a zero point minus eight scales is no fp32 number"):
        one(tmp_path)
    decoded = one(tmp_path, on_unsupported="dequantize")
    exact = codes * float(scales[0, 0]) + float(zeros[0, 0])
    np.testing.assert_allclose(decoded.weight.numpy(), exact, rtol=2e-7)


@pytest.mark.parametrize(("group_size", "algorithm"), [(64, "W4A16_AWQ"), (128, "MIXED_PRECISION")])
def test_modelopt_int4(group_size, algorithm, tmp_path) -> None:
    rng, K, N = np.random.default_rng(4), 256, 24
    codes, scales = random_codes(rng, N, K) - 8, random_floats(rng, (N, K // group_size), "fp32")
    low, high = codes[0::2] & 15, codes[1::2] & 15
    tensors = {f"{LAYER}.weight": (low | (high << 4)).astype(np.uint8), f"{LAYER}.weight_scale": scales}
    settings = {"quant_method": "modelopt", "quant_algo": algorithm}
    settings |= {"group_size": group_size} if algorithm == "W4A16_AWQ" else {"quantized_layers": {LAYER: {}}}
    save(tmp_path, tensors, {"quantization_config": settings})
    layer = one(tmp_path)
    assert (layer.weight_format, layer.group_size, layer.source) == ("uint4b8", group_size, "modelopt int4")
    assert open_reader(tmp_path).sizes(0) == (N, K)
    exact = codes * scales.double().numpy()[:, np.arange(K) // group_size]
    assert np.array_equal(layer.dequantize().T.numpy(), exact.astype(np.float32))
    assert not list(open_reader(tmp_path).other_tensors())
    before = torch.rand(K)
    save(tmp_path, tensors | {f"{LAYER}.pre_quant_scale": before}, {"quantization_config": settings})
    with pytest.raises(UnsupportedFormat, match="it scales its input"):
        one(tmp_path)
    decoded = one(tmp_path, on_unsupported="dequantize")
    np.testing.assert_allclose(decoded.weight.numpy(), exact * before.numpy(), rtol=1e-6)
    save(tmp_path, tensors, {"quantization_config": settings | {"quant_algo": "W4A8_AWQ"}})
    with pytest.raises(UnsupportedFormat, match="quant_algo 'W4A8_AWQ' is not read"):
        one(tmp_path)
