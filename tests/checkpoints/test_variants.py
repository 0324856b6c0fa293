"""Reads uncommon settings, containers and layouts: versions, shards, pickles, wrappers, other widths."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoint_damage
from tests.support import checkpoint_writers as writers
from tests.support.checkpoint_writers import LAYER
from torch_marlin_metal import convert
from torch_marlin_metal.repack import unpack_codes

K, N = 128, 24


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def decode(path: Path, **options) -> np.ndarray:
    (weight,) = convert.read_layers(path, **options)
    return weight.dequantize().t().numpy()


def change(path: Path, *, settings: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> None:
    """Replaces settings and tensors of the layer. A tensor whose value is None is removed."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= settings or {}
    (path / "config.json").write_text(json.dumps(config))
    checkpoint_damage.change(path, **tensors)


@pytest.mark.parametrize(
    ("words", "codes"),
    [([0x76543210], [0, 1, 2, 3, 4, 5, 6, 7]), ([0x91C3780F], [15, 0, 8, 7, 3, 12, 1, 9])],
)
def test_gptq_words_from_the_format_description(tmp_path, words, codes) -> None:
    tensors = {
        f"{LAYER}.qweight": np.array([words], dtype=np.uint32).view(np.int32),
        f"{LAYER}.scales": torch.ones(1, 1, dtype=torch.float16),
    }
    writers.save(tmp_path, tensors, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}})
    np.testing.assert_array_equal(decode(tmp_path), [[code - 8 for code in codes]])


def test_compressed_tensors_words_from_the_format_description(tmp_path) -> None:
    """compressed-tensors adds 8 to signed codes and zero points before it packs them. It packs zero points along N."""
    word, points = np.uint32(0x194BF870), np.uint32(0x988F0A78)
    codes, zeros = np.array([-8, -1, 0, 7, 3, -4, 1, -7]), np.array([0, -1, 2, -8, 7, 0, 0, 1])
    tensors = {
        f"{LAYER}.weight_packed": np.full((8, 1), word).view(np.int32),
        f"{LAYER}.weight_zero_point": np.full((1, 1), points).view(np.int32),
        f"{LAYER}.weight_scale": torch.ones(8, 1),
        f"{LAYER}.weight_shape": torch.tensor([8, 8]),
    }
    group = {"weights": {"num_bits": 4, "symmetric": False, "strategy": "channel"}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    writers.save(tmp_path, tensors, {"quantization_config": settings})
    np.testing.assert_array_equal(decode(tmp_path), codes[None, :] - zeros[:, None])


@pytest.mark.parametrize("format_key", ["checkpoint_format", "format"])
def test_gptq_version_comes_from_either_key_and_the_caller_overrides_it(tmp_path, rng, format_key) -> None:
    expected = writers.write_gptq(tmp_path, rng, K, N, 32, version=2)
    change(tmp_path, settings={"checkpoint_format": None, format_key: "gptq_v2"})
    np.testing.assert_array_equal(decode(tmp_path), expected)
    change(tmp_path, settings={format_key: None})
    with pytest.warns(UserWarning, match="raw zero points of 15"):
        assert not np.array_equal(decode(tmp_path), expected)
    np.testing.assert_array_equal(decode(tmp_path, gptq_version=2), expected)


def test_gptq_all_zero_g_idx_is_no_act_order(tmp_path, rng) -> None:
    expected = writers.write_gptq(tmp_path, rng, K, N, 32, version=2)
    change(tmp_path, g_idx=torch.zeros(K, dtype=torch.int32))
    with pytest.warns(UserWarning, match="g_idx is all zero"):
        np.testing.assert_array_equal(decode(tmp_path), expected)


def test_gptq_modules_with_settings_of_their_own(tmp_path, rng) -> None:
    expected = writers.write_gptq(tmp_path, rng, K, N, 32, sym=True)
    change(
        tmp_path, settings={"group_size": 128, "bits": 8, "dynamic": {"+:.*down_proj": {"bits": 4, "group_size": 32}}}
    )
    np.testing.assert_array_equal(decode(tmp_path), expected)


def test_awq_without_zero_points_is_symmetric(tmp_path, rng) -> None:
    writers.write_awq(tmp_path, rng, K, N, 32)
    codes = load_file(tmp_path / "model.safetensors")[f"{LAYER}.qweight"]
    change(tmp_path, qzeros=None)
    (weight,) = convert.read_layers(tmp_path)
    assert weight.weight_format == "uint4b8"
    assert torch.equal(weight.b_packed, torch.ops.torch_marlin_metal.awq_repack(codes))


def test_awq_products_that_no_integer_zero_point_gives_stay_floating(tmp_path, rng) -> None:
    writers.write_awq(tmp_path, rng, K, N, 32, version="gemv_fast")
    tensors = load_file(tmp_path / "model.safetensors")
    products = tensors[f"{LAYER}.qzeros"] * 1.03
    change(tmp_path, qzeros=products)
    (weight,) = convert.read_layers(tmp_path)
    assert weight.weight_format == "uint4_bias"
    assert torch.equal(weight.zeros, products[:4])


UNSUPPORTED: dict[str, Any] = {
    "gptq": lambda path, rng: writers.write_gptq(path, rng, K, N, 8, version=2),
    "gptq act-order": lambda path, rng: writers.write_gptq(path, rng, K, N, 8, version=2, act_order=True),
    "awq": lambda path, rng: writers.write_awq(path, rng, K, N, 8),
    "compressed-tensors": lambda path, rng: writers.write_compressed_tensors(path, rng, K, N, 8, sym=False),
    "hqq": lambda path, rng: writers.write_hqq(path, rng, K, N, 8),
    "hqq axis 0": lambda path, rng: writers.write_hqq(path, rng, K, N, 64, axis=0),
    "intx": lambda path, rng: writers.write_intx(path, rng, K, N, 8, sym=False),
    "bitsandbytes": lambda path, rng: writers.write_bitsandbytes(path, rng, 72, N, 64),
    "bitsandbytes, odd K": lambda path, rng: writers.write_bitsandbytes(path, rng, 66, N, 64),
    "compressed-tensors, odd K": lambda path, rng: writers.write_compressed_tensors(path, rng, 100, N, 32),
    "intx, odd K": lambda path, rng: writers.write_intx(path, rng, 100, N, 32, sym=True),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_the_operators_cannot_represent_is_decoded_on_request(tmp_path, rng, case) -> None:
    expected = UNSUPPORTED[case](tmp_path, rng)
    with pytest.raises(convert.UnsupportedFormat, match=LAYER):
        list(convert.read_layers(tmp_path))
    (dense,) = convert.read_layers(tmp_path, on_unsupported="dequantize")
    assert isinstance(dense, convert.DenseWeight)
    np.testing.assert_array_equal(dense.weight.numpy(), expected)


def test_a_group_beyond_the_allowed_sizes_is_split_without_loss(tmp_path, rng) -> None:
    expected = writers.write_gptq(tmp_path, rng, 1024, N, 512, version=2)
    (weight,) = convert.read_layers(tmp_path)
    assert weight.group_size == 256
    np.testing.assert_array_equal(weight.dequantize().t().numpy(), expected)


@pytest.mark.parametrize(
    ("packing", "version"),
    [("auto_round:auto_gptq", 1), ("auto_round", 2), ("auto_round:gptqmodel", 2), ("auto_round:gptq", 1)],
)
@pytest.mark.filterwarnings("ignore:.*raw zero points of 15")
def test_auto_round_in_gptq_layout(tmp_path, rng, packing, version) -> None:
    settings = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": False}
    expected = writers.write_gptq(tmp_path, rng, K, N, 32, version=version, config=settings)
    np.testing.assert_array_equal(decode(tmp_path), expected)


def test_auto_round_in_compressed_tensors_layout(tmp_path, rng) -> None:
    expected = writers.write_nvfp4(tmp_path, rng, K, N, container="compressed-tensors")
    settings = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    np.testing.assert_array_equal(decode(tmp_path), expected)


def test_mlx_settings_of_single_modules_and_transformers_names(tmp_path, rng) -> None:
    (expected,) = writers.write_mlx_affine(tmp_path, rng, K, N, 32)
    settings = {"group_size": 64, "bits": 8, LAYER: {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": settings}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{LAYER}.qbiases"] = tensors.pop(f"{LAYER}.biases")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "mlx"})
    np.testing.assert_array_equal(decode(tmp_path), expected)


@pytest.mark.parametrize("method", ["metal", "auto-round"])
def test_mlx_layers_under_other_methods(tmp_path, rng, method) -> None:
    """Reads MLX layers under the configs that transformers' Metal quantizer and AutoRound write.

    AutoRound stores the settings of single modules only under "quantization".
    """
    (expected,) = writers.write_mlx_affine(tmp_path, rng, K, N, 32)
    own = {LAYER: {"group_size": 32, "bits": 4}}
    settings = {"quant_method": method, "packing_format": "mlx", "group_size": 64, "bits": 8}
    config = {"quantization_config": settings | own} if method == "metal" else {
        "quantization_config": settings, "quantization": settings | own
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(decode(tmp_path), expected)


def test_compressed_tensors_zero_points_that_are_not_packed(tmp_path, rng) -> None:
    """Old versions store int8 zero points. So does the strategy "tensor", which has a single scale."""
    expected = writers.write_compressed_tensors(tmp_path, rng, K, N, -1, sym=False)
    packed = load_file(tmp_path / "model.safetensors")[f"{LAYER}.weight_zero_point"]
    points = unpack_codes(packed)[:N].to(torch.int8) - 8
    change(tmp_path, weight_zero_point=points)
    np.testing.assert_array_equal(decode(tmp_path), expected)
    change(tmp_path, weight_zero_point=points[3], weight_scale=torch.tensor([0.5]))
    (weight,) = convert.read_layers(tmp_path)
    reference = (unpack_codes(weight.b_packed).float() - 8 - points[3]) * 0.5
    assert torch.equal(weight.dequantize(), reference)


def test_compressed_tensors_g_idx_that_was_never_filled_in(tmp_path, rng) -> None:
    expected = writers.write_compressed_tensors(tmp_path, rng, K, N, 32)
    change(tmp_path, weight_g_idx=torch.full((K,), -1, dtype=torch.int32))
    np.testing.assert_array_equal(decode(tmp_path), expected)
    change(tmp_path, weight_g_idx=torch.arange(K, dtype=torch.int32) // 32 - 1)
    with pytest.raises(convert.CheckpointError, match=r"weight_g_idx': expected groups in 0\.\.3, got a range of -1"):
        decode(tmp_path)


def test_modelopt_settings_in_a_file_of_their_own(tmp_path, rng) -> None:
    expected = writers.write_nvfp4(tmp_path, rng, K, N, container="modelopt")
    (tmp_path / "config.json").unlink()
    old = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(old))
    np.testing.assert_array_equal(decode(tmp_path), expected)
    assert list(convert.open_reader(tmp_path).other_tensors()) == []  # the reader assigns input_scale to the layer


def test_compressed_tensors_global_scale_divides(tmp_path, rng) -> None:
    writers.write_nvfp4(tmp_path, rng, K, N, container="compressed-tensors")
    for divisor in rng.uniform(100, 3000, 20).astype(np.float32):
        change(tmp_path, weight_global_scale=torch.tensor([divisor]))
        (weight,) = convert.read_layers(tmp_path)
        assert torch.equal(weight.global_scale, 1 / torch.tensor([divisor]))
        codes = unpack_codes(weight.b_packed).numpy()
        scales = weight.scales.view(torch.float8_e4m3fn).double().numpy()[writers.groups_of(K, 16)]
        exact = writers.E2M1[codes] * scales / np.float64(divisor)
        error = np.abs(weight.dequantize().double().numpy() - exact)
        assert (error <= 3 * 2.0**-24 * np.abs(exact)).all()


def sharded(path: Path, rng: np.random.Generator) -> np.ndarray:
    """Writes a layer and a norm. The layer's tensors are in two shards."""
    expected = writers.write_gptq(path, rng, K, N, 32, act_order=True, sym=True)
    tensors = load_file(path / "model.safetensors") | {"norm.weight": torch.ones(3)}
    (path / "model.safetensors").unlink()
    first = {name: tensor for name, tensor in tensors.items() if name.endswith(("qweight", "norm.weight"))}
    names = {}
    for part, held in enumerate([first, {name: t for name, t in tensors.items() if name not in first}], start=1):
        save_file(held, path / f"model-{part:05d}-of-00002.safetensors")
        names |= dict.fromkeys(held, f"model-{part:05d}-of-00002.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return expected


def test_a_layer_may_lie_across_shards(tmp_path, rng) -> None:
    expected = sharded(tmp_path, rng)
    reader = convert.open_reader(tmp_path)
    assert (len(reader), reader.layer_names, reader.format.name) == (1, [LAYER], "gptq")
    (weight,) = reader
    np.testing.assert_array_equal(weight.dequantize().t().numpy(), expected)
    ((name, tensor),) = reader.other_tensors()
    assert name == "norm.weight"
    assert torch.equal(tensor, torch.ones(3))


@pytest.mark.parametrize("folder", ["", "text_encoder"])
def test_a_hub_cache_links_from_snapshots_to_blobs(tmp_path, rng, folder) -> None:
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0123" / folder
    expected = writers.write_gptq(tmp_path / "made", rng, K, N, 32, sym=True)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "made" / name, blobs / f"hash-of-{name}")
        (snapshot / name).symlink_to(os.path.relpath(blobs / f"hash-of-{name}", snapshot))
    np.testing.assert_array_equal(decode(snapshot), expected)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_are_read_only_on_request(tmp_path, rng, zipped) -> None:
    expected = writers.write_gptq(tmp_path, rng, K, N, 32, sym=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(convert.UnsupportedFormat, match="allow_pickle=True"):
        convert.open_reader(tmp_path)
    np.testing.assert_array_equal(decode(tmp_path, allow_pickle=True), expected)


class Explosive:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_is_not_executed(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    torch.save({"a.qweight": Explosive(tmp_path / "executed")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(convert.CheckpointError, match=r"pytorch_model\.bin: not a PyTorch file of plain tensors"):
        convert.open_reader(tmp_path, allow_pickle=True)
    assert not (tmp_path / "executed").exists()


def test_only_one_layer_is_in_memory_at_a_time(tmp_path, rng, monkeypatch) -> None:
    """A tensor is read only when its layer is requested."""
    expected = writers.write_gptq(tmp_path, rng, K, N, 32, sym=True, with_g_idx=False)
    tensors = load_file(tmp_path / "model.safetensors")
    copies = {f"{copy}.{name}": tensor.clone() for copy in "abc" for name, tensor in tensors.items()}
    save_file(copies, tmp_path / "model.safetensors")
    from torch_marlin_metal.checkpoints import checkpoint

    read: list[str] = []
    original = checkpoint.read_tensor
    monkeypatch.setattr(
        checkpoint, "read_tensor", lambda info, *part: (read.append(info.name[0]), original(info, *part))[1]
    )
    layers = convert.read_layers(tmp_path)
    for copy in "abc":
        np.testing.assert_array_equal(next(layers).dequantize().t().numpy(), expected)
        assert set(read) == {copy}
        read.clear()


def test_compressed_tensors_with_one_scale_and_zero_point_for_the_tensor(tmp_path, rng) -> None:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(num_bits=4, symmetric=False, strategy="tensor")
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    state = {
        "weight": torch.from_numpy(rng.standard_normal((N, K))).float(),
        "weight_scale": torch.tensor([0.3]),
        "weight_zero_point": torch.tensor([-3], dtype=torch.int8),
    }
    packed = PackedQuantizationCompressor.compress(dict(state), scheme)
    expected = PackedQuantizationCompressor.decompress(dict(packed), scheme)["weight"]
    group = {"targets": ["Linear"], "weights": json.loads(arguments.model_dump_json())}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    writers.save(tmp_path, {f"{LAYER}.{n}": t for n, t in packed.items()}, {"quantization_config": settings})
    (weight,) = convert.read_layers(tmp_path)
    assert (weight.weight_format, weight.group_size) == ("uint4", K)
    np.testing.assert_array_equal(weight.dequantize().t(), expected)


@pytest.mark.parametrize("strategy", ["tensor", None])
def test_compressed_tensors_with_one_packed_zero_point_for_the_tensor(tmp_path, rng, strategy) -> None:
    codes, zero, scale = rng.integers(-8, 8, (16, 16)), 3, 0.25
    nibbles = (codes + 8).astype(np.uint64).reshape(16, 2, 8)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint64))).sum(-1).astype(np.uint32)
    tensors = {
        f"{LAYER}.weight_packed": words.view(np.int32),
        f"{LAYER}.weight_scale": torch.tensor([scale]),
        f"{LAYER}.weight_zero_point": torch.tensor([[zero + 8]], dtype=torch.int32),
        f"{LAYER}.weight_shape": torch.tensor([16, 16]),
    }
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": strategy}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    writers.save(tmp_path, tensors, {"quantization_config": settings})
    (weight,) = convert.read_layers(tmp_path)
    np.testing.assert_array_equal(weight.dequantize().t(), (codes - zero) * scale)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (160, 1), (160, 8), (2, 2)])
def test_int8_with_a_zero_point_for_each_scale(tmp_path, rng, rows, columns) -> None:
    """One scale for the tensor, a row, a group of a row, or a block of 128 x 128, of which the last has 32 rows."""
    codes = rng.integers(-128, 128, (160, 256)).astype(np.int8)
    scales, zeros = rng.random((rows, columns)).astype(np.float32), rng.integers(-9, 9, (rows, columns))
    tensors = {f"{LAYER}.weight": codes, f"{LAYER}.weight_scale": scales}
    tensors[f"{LAYER}.weight_zero_point"] = zeros.astype(np.int8)
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    settings["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}}
    writers.save(tmp_path, tensors, {"quantization_config": settings})
    size = 128 if rows == 2 else 160 // rows, 256 // columns
    scale, zero = (part.repeat(size[0], 0).repeat(size[1], 1)[:160] for part in (scales, zeros))
    np.testing.assert_array_equal(decode(tmp_path), (codes - zero).astype(np.float32) * scale)
