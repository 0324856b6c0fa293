"""Codes of 1 to 3 bits become codes of 4 bits, codes of 7 bits become codes of 8 bits, and 5 and 6 bits stay."""

from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hqq.core.quantize import Quantizer
from safetensors.torch import load_file

from tests.support import checkpoint_writers as writers
from torch_marlin_metal import convert
from torch_marlin_metal.checkpoints.grouped import planes_of_codes
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.repack import pack_planes

LAYER, K, N = writers.LAYER, 128, 32


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def bit_string(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs each column as one little-endian bit string."""
    columns = []
    for column in values.T:
        number = sum(int(value) << (bits * i) for i, value in enumerate(column))
        columns.append(np.frombuffer(number.to_bytes(len(column) * bits // 8, "little"), dtype=np.int32))
    return np.stack(columns, axis=1)


def planes(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs like GPTQModel's gptq_p: for each 32 codes of a column, words of their low bits, then of the next bits."""
    widths = {2: (2,), 3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}[bits]
    rows = []
    for block in values.reshape(-1, 32, values.shape[1]):
        first = 0
        for width in widths:
            rows.append(bit_string((block >> first) & ((1 << width) - 1), width))
            first += width
    return np.concatenate(rows)


def write_gptq(
    path: Path,
    rng: np.random.Generator,
    bits: int,
    *,
    packed=bit_string,
    version: int = 1,
    sym: bool = False,
    act_order: bool = False,
) -> np.ndarray:
    """Writes a GPTQ layer of any code width, and returns its weight `[N, K]`."""
    G, top = K // 32, 1 << bits
    codes = rng.integers(0, top, (K, N))
    zeros = np.full((G, N), top // 2) if sym else rng.integers(version == 1, top, (G, N))
    if version == 2 and not sym:
        zeros[1, 4] = 0
    scales = writers.random_floats(rng, (G, N), "fp16")
    stored = zeros - (version == 1)
    tensors = {"qweight": packed(codes, bits), "qzeros": packed(stored.T, bits).T, "scales": scales}
    groups = rng.permutation(writers.groups_of(K, 32)) if act_order else writers.groups_of(K, 32)
    if act_order:
        tensors["g_idx"] = groups.astype(np.int32)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": sym}
    settings["checkpoint_format"] = "gptq_p" if packed is planes else f"gptq_v{version}" if version == 2 else "gptq"
    writers.save(path, {f"{LAYER}.{n}": t for n, t in tensors.items()}, {"quantization_config": settings})
    return writers.affine(codes, zeros, scales, groups)


def assert_equal(path: Path, expected: np.ndarray, weight_format: str, **options) -> None:
    (weight,) = convert.read_layers(path, **options)
    assert isinstance(weight, PackedWeight)
    assert weight.weight_format == weight_format
    np.testing.assert_array_equal(weight.dequantize().t().numpy(), expected)


def wider(bits: int, sym: bool) -> str:
    """Returns the narrowest weight format that holds a file's integers of this many bits."""
    width = next(width for width in (4, 5, 6, 8) if width >= bits)
    return f"uint{width}b{1 << width - 1}" if sym else f"uint{width}"


@pytest.mark.filterwarnings("ignore:.*raw zero points of")
@pytest.mark.parametrize(
    ("bits", "version", "sym"),
    [
        (2, 1, False),
        (2, 2, True),
        (3, 1, True),
        (3, 2, False),
        (6, 1, False),
        (6, 2, True),
        (8, 1, True),
        (8, 2, False),
    ],
)
def test_gptq(tmp_path, rng, bits, version, sym) -> None:
    expected = write_gptq(tmp_path, rng, bits, version=version, sym=sym)
    assert_equal(tmp_path, expected, wider(bits, sym))


@pytest.mark.parametrize(("bits", "packed"), [(3, bit_string), (5, planes), (6, bit_string), (8, bit_string)])
def test_gptq_with_act_order(tmp_path, rng, bits, packed) -> None:
    expected = write_gptq(tmp_path, rng, bits, packed=packed, version=2, act_order=True)
    assert_equal(tmp_path, expected, wider(bits, False))


@pytest.mark.parametrize("bits", [5, 6])
def test_the_second_plane_is_that_of_pack_planes(rng, bits) -> None:
    for length in (8, 24, 40, 64):
        codes = torch.from_numpy(rng.integers(0, 1 << bits, (length, 5)).astype(np.uint8))
        for given in (codes.t(), codes.t().contiguous()):
            for found, expected in zip(planes_of_codes(given, bits), pack_planes(codes, bits), strict=True):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_gptq_in_planes(tmp_path, rng, bits) -> None:
    assert_equal(tmp_path, write_gptq(tmp_path, rng, bits, packed=planes, version=2), wider(bits, False))


@pytest.mark.parametrize(("bits", "ones"), [(2, 0x55555555), (8, 0x01010101)])
def test_a_zero_point_of_0_borrows_in_version_1(tmp_path, rng, bits, ones) -> None:
    """GPTQModel subtracts 1 from each field of a word at once, so a zero point of 0 borrows from the next one."""
    expected, top = write_gptq(tmp_path, rng, bits, version=2), (1 << bits) - 1
    tensors = load_file(tmp_path / "model.safetensors")
    words = tensors[f"{LAYER}.qzeros"]
    assert bool(((words & top) == 0).any())
    tensors[f"{LAYER}.qzeros"] = (words.long() - ones).to(torch.int32)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False}
    writers.save(tmp_path, {n: t.numpy() for n, t in tensors.items()}, {"quantization_config": settings})
    with pytest.warns(UserWarning, match=f"raw zero points of {top} in a version 1 file"):
        assert_equal(tmp_path, expected, wider(bits, False))
    for rule in ("masked", "unmasked"):
        with pytest.warns(UserWarning, match=f"raw zero points of {top}"):
            (other,) = convert.read_layers(tmp_path, gptq_zeros_rule=rule)
        assert not np.array_equal(other.dequantize().t().numpy(), expected)


@pytest.mark.parametrize(
    ("bits", "group_size"), [(1, 64), (2, 32), (3, 32), (3, 64), (4, 32), (5, 64), (6, 32), (6, 8), (8, 64)]
)
def test_hqq(tmp_path, bits, group_size) -> None:
    """Compares with the package hqq. Its words hold ten 3-bit codes, and the number of groups is no multiple of ten."""
    torch.manual_seed(0)
    options = {"axis": 1, "compute_dtype": torch.float32, "device": "cpu", "optimize": False}
    packed, meta = Quantizer.quantize(torch.randn(N, K), nbits=bits, group_size=group_size, **options)
    expected = Quantizer.dequantize(packed, meta)
    tensors = {"W_q": packed, "scale": meta["scale"], "zero": meta["zero"]}
    tensors |= {"shape": torch.tensor([N, K]), "nbits": torch.tensor(bits), "axis": torch.tensor(1)}
    text = meta["packing"].encode()
    tensors["packing"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    weights = {"nbits": bits, "group_size": group_size, "axis": 1}
    config = {"quantization_config": {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}}}
    writers.save(tmp_path, {f"{LAYER}.{n}": t.numpy() for n, t in tensors.items()}, config)
    if group_size == 8:  # no weight format supports groups of 8
        (layer,) = convert.read_layers(tmp_path, on_unsupported="dequantize")
        assert isinstance(layer, convert.DenseWeight)
        np.testing.assert_array_equal(layer.weight.numpy(), expected.numpy())
        return
    assert_equal(tmp_path, expected.numpy(), wider(bits, False))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7])
def test_torchao(tmp_path, rng, bits) -> None:
    """IntxUnpackedToInt8Tensor stores signed codes in bytes."""
    top = 1 << bits - 1
    codes = rng.integers(-top, top, (N, K)).astype(np.int8)
    scales, points = rng.uniform(0.01, 1, (N, K // 32)).astype(np.float32), rng.integers(-top, top, (N, K // 32))
    tensors = {"weight.qdata": codes, "weight.scale": scales, "weight.zero_point": points.astype(np.int8)}
    attributes = {"class": "IntxUnpackedToInt8Tensor", "target_dtype": f"torch.int{bits}", "block_size": "(1, 32)"}
    config = {"quantization_config": {"quant_method": "torchao"}, "tensor_attributes": attributes}
    writers.save(tmp_path, {f"{LAYER}.{n}": t for n, t in tensors.items()}, config)
    expected = (codes - points.repeat(32, 1)).astype(np.float32) * scales.repeat(32, 1)
    assert_equal(tmp_path, expected, wider(bits, False))
    codes[0, 0] = top
    writers.save(tmp_path, {f"{LAYER}.{n}": t for n, t in tensors.items()}, config)
    with pytest.raises(convert.CheckpointError, match=rf"expected int{bits} codes in -{top}\.\.{top - 1}, got a range"):
        list(convert.read_layers(tmp_path))


@pytest.mark.parametrize(("bits", "sym"), [(2, False), (2, True), (3, False), (3, True), (6, False), (7, True)])
def test_compressed_tensors(tmp_path, rng, bits, sym) -> None:
    """compressed-tensors packs signed codes and zero points, the zero points along N."""
    top, G = 1 << bits - 1, K // 32
    codes, points = rng.integers(-top, top, (N, K)), rng.integers(-top, top, (N, G)) * (not sym)
    scales = writers.random_floats(rng, (N, G), "fp16")
    tensors = {"weight_packed": pack_to_int32(torch.from_numpy(codes).to(torch.int8), bits), "weight_scale": scales}
    tensors["weight_shape"] = torch.tensor([N, K])
    if not sym:
        tensors["weight_zero_point"] = pack_to_int32(torch.from_numpy(points).to(torch.int8), bits, packed_dim=0)
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group", "group_size": 32}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config |= {"config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}
    writers.save(tmp_path, {f"{LAYER}.{n}": t for n, t in tensors.items()}, {"quantization_config": config})
    expected = (codes - points.repeat(32, 1)).astype(np.float32) * scales.float().numpy().repeat(32, 1)
    assert_equal(tmp_path, expected, wider(bits, sym))


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_mlx_in_pieces(tmp_path, rng, monkeypatch, bits) -> None:
    monkeypatch.setattr("torch_marlin_metal.checkpoints.grouped.PIECE", 5 * K)
    codes = rng.integers(0, 1 << bits, (K, N))
    scales, biases = (rng.uniform(-1, 1, (N, K // 32)).astype(np.float16).astype(np.float32) for _ in range(2))
    tensors = {"weight": bit_string(codes, bits).T.copy().view(np.uint32), "scales": scales, "biases": biases}
    config = {"quantization": {"group_size": 32, "bits": bits, "mode": "affine"}}
    writers.save(tmp_path, {f"{LAYER}.{n}": t for n, t in tensors.items()}, config)
    exact = codes.T.astype(np.float64) * scales.repeat(32, 1) + biases.repeat(32, 1)
    assert_equal(tmp_path, exact.astype(np.float32), f"{wider(bits, False)}_bias")
