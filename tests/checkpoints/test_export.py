"""Exports have the same tensors as files of other programs, or are refused."""

import errno
import json
import os

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file

from tests.support import checkpoint_writers as writers
from tests.support.checkpoint_writers import LAYER
from tests.support.fixture_layers import DATA, source_of
from torch_marlin_metal import convert, quantize_weight
from torch_marlin_metal.checkpoints.exporters import EXPORTERS
from torch_marlin_metal.checkpoints.files import shard_writer
from torch_marlin_metal.packed_weight import PackedWeight

K, N = 256, 24


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def sources():
    def gptq(version, **options):
        return lambda path, rng: writers.write_gptq(path, rng, K, N, 32, version=version, **options)

    def compressed(**options):
        return lambda path, rng: writers.write_compressed_tensors(path, rng, K, N, 64, **options)

    return {
        "gptq 1": ("gptq", {}, gptq(1, sym=True)),
        "gptq 1 act-order": ("gptq", {}, gptq(1, sym=True, act_order=True)),
        "gptq 2": ("gptq", {"version": 2}, gptq(2)),
        "gptq 2 act-order": ("gptq", {"version": 2}, gptq(2, act_order=True, dtype="bf16")),
        "gptq one group": ("gptq", {}, lambda path, rng: writers.write_gptq(path, rng, 200, N, -1, sym=True)),
        "awq": ("awq", {}, lambda path, rng: writers.write_awq(path, rng, K, N, 128)),
        "compressed-tensors": ("compressed-tensors", {}, compressed()),
        "compressed-tensors asymmetric": ("compressed-tensors", {}, compressed(sym=False)),
        "compressed-tensors act-order": ("compressed-tensors", {}, compressed(act_order=True)),
        "compressed-tensors channel": (
            "compressed-tensors",
            {},
            lambda path, rng: writers.write_compressed_tensors(path, rng, 200, 20, -1, sym=False),
        ),
        "nvfp4": (
            "compressed-tensors",
            {},
            lambda path, rng: writers.write_nvfp4(path, rng, K, N, container="compressed-tensors"),
        ),
        "mxfp4": (
            "compressed-tensors",
            {},
            lambda path, rng: writers.write_mxfp4(path, rng, K, N, container="compressed-tensors"),
        ),
    }


@pytest.mark.parametrize("case", sources())
def test_reading_and_exporting_gives_the_tensors_of_the_source(tmp_path, rng, case) -> None:
    target, options, write = sources()[case]
    expected = write(tmp_path / "source", rng)
    path = convert.export_checkpoint(convert.read_layers(tmp_path / "source"), tmp_path / "out", target, **options)
    before, after = load_file(tmp_path / "source/model.safetensors"), load_file(path / "model-00001.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    (weight,) = convert.read_layers(path)
    np.testing.assert_array_equal(weight.dequantize().t().numpy(), expected)


@pytest.mark.parametrize(
    "folder",
    [
        "gptq/gptqmodel-sym-g32-actorder-v1",
        "awq/autoawq-gemm-asym-g32",
        "compressed-tensors/int4-asym-g64",
        "compressed-tensors/w8a16-asym-g64",
        "compressed-tensors/w8a16-sym-channel",
        "compressed-tensors/fp8-channel",
        "compressed-tensors/mxfp8",
    ],
)
def test_a_real_layer_exported_to_its_own_format_is_unchanged(tmp_path, folder) -> None:
    target = folder.split("/")[0]
    path = convert.export_checkpoint(convert.read_layers(DATA / folder), tmp_path / "out", target)
    before, after = load_file(DATA / folder / "model.safetensors"), load_file(path / "model-00001.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("folder", ["gptq/autoround-8bit-asym-g64", "gptq/autoround-8bit-sym-g32"])
def test_a_layer_of_8_bit_of_gptq_is_unchanged(tmp_path, folder) -> None:
    """AutoRound writes no g_idx, so it is not compared."""
    path = convert.export_checkpoint(convert.read_layers(DATA / folder), tmp_path / "out", "gptq")
    before, after = load_file(DATA / folder / "model.safetensors"), load_file(path / "model-00001.safetensors")
    assert [name.rpartition(".")[2] for name in set(after) - set(before)] == ["g_idx"]
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    assert (settings["bits"], settings["sym"]) == (8, "asym" not in folder)


@pytest.mark.parametrize(
    "folder", ["fp8/transformers-16x128", "compressed-tensors/fp8-tensor", "gguf/Q8_0", "gguf/Q6_K"]
)
def test_compressed_tensors_itself_decodes_an_export_of_8_bit(tmp_path, folder) -> None:
    (weight,) = read(folder)
    weight = weight.one_level()
    weight.name, weight.scales = "l", weight.scales.float()
    path = convert.export_checkpoint([weight], tmp_path / "out", "compressed-tensors")
    state = {name.removeprefix("l."): tensor for name, tensor in load_file(path / "model-00001.safetensors").items()}
    group = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**group["weights"]), format=group["format"]
    )
    theirs = {"float-quantized": FloatQuantizationCompressor, "pack-quantized": PackedQuantizationCompressor}
    decoded = theirs[group["format"]].decompress(state, scheme)["weight"]
    assert torch.equal(decoded.float(), weight.dequantize().t())


def test_act_order_of_8_bit_comes_back(tmp_path) -> None:
    (weight,) = convert.read_layers(DATA / "gptq/autoround-8bit-asym-g64")
    weight.perm = torch.randperm(K, generator=torch.Generator().manual_seed(3)).int()
    for target in ("gptq", "compressed-tensors"):
        (after,) = convert.read_layers(convert.export_checkpoint([weight], tmp_path / target, target))
        assert after.perm is not None and after.weight_format == "uint8"
        assert torch.equal(after.dequantize(), weight.dequantize())


def named(name: str, weight_format: str = "uint4b8", group_size: int = 32, N: int = N) -> PackedWeight:
    weight = quantize_weight(torch.randn(N, K, generator=torch.Generator().manual_seed(1)), weight_format, group_size)
    weight.name = name
    return weight


def read(folder: str) -> list[PackedWeight]:
    return list(convert.read_layers(source_of(DATA / folder)))


def eight(name: str, folder: str) -> PackedWeight:
    """Returns the 8-bit weight of a fixture under another name."""
    (weight,) = read(folder)
    weight.name = name
    return weight


def test_layers_of_several_kinds_in_one_checkpoint(tmp_path) -> None:
    weights = [
        named("a"),
        named("b", "uint4", 64),
        named("c", "nvfp4", 16),
        named("d", "mxfp4", 32),
        named("e", "uint4"),
        eight("f", "compressed-tensors/w8a16-asym-g64"),
        eight("g", "compressed-tensors/fp8-tensor"),
        eight("h", "mlx/mxfp8-bfloat16"),
        eight("i", "gguf/Q8_0"),
        eight("j", "fp8/transformers-16x128"),
    ]
    for weight in weights:
        if weight.weight_format == "nvfp4":
            weight.global_scale = torch.tensor([2.0**-5])
    others = [("norm.weight", torch.ones(4, dtype=torch.bfloat16))]
    path = convert.export_checkpoint(
        weights, tmp_path / "out", "compressed-tensors", other_tensors=others, config={"model_type": "llama"},
        max_shard_bytes=4000,
    )  # fmt: skip
    assert len(list(path.glob("model-*.safetensors"))) > 2
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["format"] == "mixed-precision"
    reader = convert.open_reader(path)
    for before, after in zip(weights, reader, strict=True):
        assert before.name == after.name
        assert torch.equal(before.dequantize(), after.dequantize())
    ((name, tensor),) = reader.other_tensors()
    assert name == "norm.weight"
    assert torch.equal(tensor, others[0][1])


def test_gptq_layers_of_another_group_size_have_settings_of_their_own(tmp_path) -> None:
    weights = [named("model.a"), named("model.b", group_size=64), named("model.c"), named("d", group_size=K)]
    weights += [eight("e", "gguf/Q8_0"), eight("f", "gguf/Q5_0")]  # 5 bits are written as 8
    path = convert.export_checkpoint(weights, tmp_path / "out", "gptq")
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    assert settings["group_size"] == 32
    assert settings["dynamic"] == {
        r"+:^model\.b$": {"group_size": 64},
        "+:^d$": {"group_size": K},
        "+:^e$": {"group_size": 32, "bits": 8},
        "+:^f$": {"group_size": 32, "bits": 8},
    }
    for before, after in zip(weights, convert.read_layers(path), strict=True):
        assert torch.equal(before.dequantize(), after.dequantize())


REFUSED = {
    "gptq, bias format": ("gptq", lambda: named("l", "uint4_bias"), "uint4_bias is not integer codes"),
    "gptq, N": ("gptq", lambda: named("l", N=20), "N=20 is not a multiple of 8"),
    "gptq, bias of 5 bit": ("gptq", lambda: eight("l", "gguf/Q5_1"), "uint5_bias is not integer codes"),
    "awq, 8 bit": ("awq", lambda: eight("l", "gguf/Q8_0"), "uint8b128 has 8 bits, AWQ's layout has 4"),
    "awq, N": ("awq", lambda: named("l", N=20), "N=20 is not a multiple of 8"),
    "compressed-tensors, table": ("compressed-tensors", lambda: named("l", "lut4"), "lut4 is not integer codes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_is_refused(tmp_path, case) -> None:
    target, make, reason = REFUSED[case]
    with pytest.raises(convert.UnsupportedFormat, match=f"layer 'l': not exported to .* without loss: {reason}"):
        convert.export_checkpoint([make()], tmp_path / "out", target)
    assert list(tmp_path.iterdir()) == []


def test_more_refusals(tmp_path) -> None:
    floating = named("l", "uint4")
    floating.zeros = floating.zeros.float() + 0.5
    with pytest.raises(convert.UnsupportedFormat, match="zero points are not codes"):
        convert.export_checkpoint([floating], tmp_path / "out", "gptq")
    zero = named("l", "uint4")
    zero.zeros[0, 0] = 0
    with pytest.raises(convert.UnsupportedFormat, match="GPTQ version 1 without loss: a zero point of 0"):
        convert.export_checkpoint([zero], tmp_path / "out", "gptq")
    convert.export_checkpoint([zero], tmp_path / "version 2", "gptq", version=2)
    ordered = named("l")
    ordered.perm = torch.arange(K, dtype=torch.int32).flip(0)
    with pytest.raises(convert.UnsupportedFormat, match="it has act-order"):
        convert.export_checkpoint([ordered], tmp_path / "out", "awq")
    with pytest.raises(convert.UnsupportedFormat, match=r"layer 'm'.* its group size is 64, but 32 in earlier layers"):
        convert.export_checkpoint([named("l"), named("m", group_size=64)], tmp_path / "out", "awq")
    scaled = named("l", "nvfp4", 16)
    scaled.global_scale = torch.rand(N) + 1
    with pytest.raises(convert.UnsupportedFormat, match="its global scale is not the inverse of one fp32 number"):
        convert.export_checkpoint([scaled], tmp_path / "out", "compressed-tensors")
    with pytest.raises(ValueError, match="target: expected one of gptq, awq, compressed-tensors, got 'marlin'"):
        convert.export_checkpoint([named("l")], tmp_path / "out", "marlin")
    with pytest.raises(ValueError, match="weights: expected at least one layer"):
        convert.export_checkpoint([], tmp_path / "out", "gptq")
    with pytest.raises(FileExistsError, match="exists already"):
        convert.export_checkpoint([named("l")], tmp_path / "version 2", "gptq")
    assert [file.name for file in tmp_path.iterdir()] == ["version 2"]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    def full(self, name, tensor, dtype=None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shard_writer.ShardWriter, "add", full)
    with pytest.raises(OSError, match="No space left"):
        convert.export_checkpoint([named("l")], tmp_path / "out", "gptq")
    assert list(tmp_path.iterdir()) == []


def test_the_layer_keeps_its_bias_and_name(tmp_path, rng) -> None:
    weight = named(LAYER)
    weight.bias = torch.linspace(-1, 1, N, dtype=torch.float16)
    for target in EXPORTERS:
        path = convert.export_checkpoint([weight], tmp_path / target, target)
        (after,) = convert.read_layers(path)
        assert after.name == LAYER
        assert torch.equal(after.bias, weight.bias)
        assert torch.equal(after.dequantize(), weight.dequantize())
