"""Decodes files that the package gguf wrote, and compares the values with those of its own dequantizers."""

import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from torch_marlin_metal import convert
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS
from torch_marlin_metal.checkpoints.formats.gguf_orders import row_order
from torch_marlin_metal.packed_weight import PackedWeight

# The offsets in a block at which fp16 numbers start. Random bytes there could make an infinite number.
FP16_AT = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q4_K": [0, 2],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
    "NVFP4": [],
    "Q5_0": [0],
    "Q8_0": [0],
    "Q5_1": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "IQ1_S": [0],
    "IQ1_M": [],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
}
# For each type: the packed weight's format and group size, and its bits per weight with the scales.
SIZES = {
    "Q4_K": ("uint4_bias", 32, 4.625),
    "IQ4_XS": ("lut4", 32, 4.3125),
    "Q5_K": ("uint5_bias", 32, 5.625),
    "Q6_K": ("uint6b32", 16, 6.5625),
    "Q2_K": ("uint4_bias", 16, 5.125),
    "Q3_K": ("uint4b8", 16, 4.5625),
    "TQ1_0": ("uint4b8", 256, 4.0625),
    "TQ2_0": ("uint4b8", 256, 4.0625),
    "IQ1_S": ("lut4", 32, 4.3125),
    "IQ1_M": ("lut4", 16, 4.5625),
    "IQ2_XXS": ("lut4", 32, 4.3125),
    "IQ2_XS": ("lut4", 16, 4.5625),
    "IQ2_S": ("lut4", 16, 4.5625),
    "IQ3_XXS": ("lut4", 32, 4.3125),
    "IQ3_S": ("lut4", 32, 4.3125),
    "Q5_0": ("uint5b16", 32, 5.5),
    "Q5_1": ("uint5_bias", 32, 6),
    "Q8_0": ("uint8b128", 32, 8.5),
}
FORMATS = {
    "Q4_0": "uint4b8",
    "Q4_1": "uint4_bias",
    "Q4_K": "uint4_bias",
    "IQ4_NL": "lut4",
    "IQ4_XS": "lut4",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "Q8_0": "uint8b128",
    "Q6_K": "uint6b32",
    "Q5_0": "uint5b16",
    "Q5_1": "uint5_bias",
    "Q5_K": "uint5_bias",
}


def random_blocks(rng: np.random.Generator, type_name: str, *rows: int, K: int = 512) -> np.ndarray:
    """Returns random codes and scales as uint8 `[*rows, bytes per row]`."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    blocks = rng.integers(0, 256, (*rows, K // block, block_bytes), dtype=np.uint8)
    for offset in FP16_AT[type_name]:
        values = (rng.uniform(0.001, 0.1, blocks.shape[:-1]) * rng.choice([-1, 1], blocks.shape[:-1])).astype(
            np.float16
        )
        blocks[..., offset : offset + 2] = values[..., None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[..., 0] = rng.integers(100, 140, blocks.shape[:-1])
    if type_name == "NVFP4":
        # the scales include 0x7F, which ggml reads as 0
        blocks[..., :4] = rng.integers(0, 0x80, (*blocks.shape[:-1], 4))
    return blocks.reshape(*rows, -1)


class Writer:
    def __init__(self, path: Path, architecture: str = "llama") -> None:
        self.path, self.gguf = path, GGUFWriter(path, architecture)

    def add(self, name: str, data: np.ndarray, type_name: str | None = None) -> "Writer":
        self.gguf.add_tensor(name, data, raw_dtype=None if type_name is None else GGMLQuantizationType[type_name])
        return self

    def write(self) -> Path:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()
        return self.path


@pytest.mark.parametrize("type_name", FORMATS)
@pytest.mark.parametrize("rows", [1, 48])
def test_type(tmp_path, type_name, rows) -> None:
    data = random_blocks(np.random.default_rng(rows), type_name, rows)
    bias = np.linspace(-1, 1, rows, dtype=np.float32)
    writer = Writer(tmp_path / "m.gguf").add("blk.0.ffn_up.weight", data, type_name).add("blk.0.ffn_up.bias", bias)
    (weight,) = convert.read_layers(writer.add("output_norm.weight", bias).write())
    assert isinstance(weight, PackedWeight)
    assert (weight.name, weight.weight_format, weight.K) == ("blk.0.ffn_up", FORMATS[type_name], 512)
    np.testing.assert_array_equal(weight.dequantize().t().numpy(), dequantize(data, GGMLQuantizationType[type_name]))
    np.testing.assert_array_equal(weight.bias.numpy(), bias)
    reader = convert.open_reader(writer.path)
    assert [name for name, _ in reader.other_tensors()] == ["output_norm.weight"]


def fp16_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the bytes of finite fp16 numbers of all magnitudes and signs, including zeros and subnormal numbers."""
    bits = rng.integers(0, 0x7C00, shape).astype(np.uint16) | (rng.integers(0, 2, shape) << 15).astype(np.uint16)
    bits.flat[:4] = (0, 0x8000, 1, 0x8001)
    return bits


@pytest.mark.parametrize("type_name", SIZES)
def test_types_are_equal_bit_for_bit(tmp_path, type_name) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (100, 100, GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1]), dtype=np.uint8)
    for offset in FP16_AT[type_name]:
        blocks[..., offset : offset + 2] = fp16_bits(rng, (100, 100, 1)).view(np.uint8)
    if type_name == "IQ1_M":  # the scale of IQ1_M is in the top bits of four words
        words, scale = blocks[..., 48:].copy().view(np.uint16), fp16_bits(rng, (100, 100))
        for number in range(4):
            words[..., number] = (words[..., number] & 0xFFF) | ((scale >> 4 * number & 15) << 12)
        blocks[..., 48:] = words.view(np.uint8)
    data = blocks.reshape(100, -1)
    (weight,) = convert.read_layers(Writer(tmp_path / "m.gguf").add("w.weight", data, type_name).write())
    bits = 8 * sum(tensor.nbytes for name, tensor in weight.tensors().items() if name != "lut") / (weight.K * weight.N)
    assert (weight.weight_format, weight.group_size, bits) == SIZES[type_name]
    found, reference = weight.dequantize().t().numpy(), dequantize(data, GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(found.view(np.uint32), reference.view(np.uint32))


def test_the_page_says_the_sizes_of_types() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats" / "checkpoints.md").read_text()
    for name, (weight_format, group_size, bits) in SIZES.items():
        count, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        assert f"| {name} | {8 * size / count:g} | {weight_format} | {group_size} | {bits:g} |\n" in page


def test_types_whose_tables_are_in_gguf_say_that_they_need_it(tmp_path, monkeypatch) -> None:
    data = random_blocks(np.random.default_rng(0), "IQ2_XS", 8)
    path = Writer(tmp_path / "m.gguf").add("w.weight", data, "IQ2_XS").write()
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        convert.UnsupportedFormat, match=r"'w\.weight': IQ2_XS needs the package gguf \(pip install gguf"
    ):
        list(convert.read_layers(path, on_unsupported="dequantize"))


def test_experts_are_layers_of_their_own(tmp_path) -> None:
    data = random_blocks(np.random.default_rng(0), "Q4_K", 3, 16)
    writer = Writer(tmp_path / "m.gguf").add("blk.0.ffn_up_exps.weight", data, "Q4_K")
    weights = list(convert.read_layers(writer.write()))
    assert [weight.name for weight in weights] == [f"blk.0.ffn_up_exps.{expert}" for expert in range(3)]
    for expert, weight in enumerate(weights):
        reference = dequantize(data[expert], GGMLQuantizationType.Q4_K)
        np.testing.assert_array_equal(weight.dequantize().t().numpy(), reference)


@pytest.mark.parametrize("suffix", [".scale", ".weight.scale"])
def test_the_scale_tensor_of_nvfp4_multiplies(tmp_path, suffix) -> None:
    data, scale = random_blocks(np.random.default_rng(0), "NVFP4", 8), np.array([0.125], dtype=np.float32)
    writer = Writer(tmp_path / "m.gguf").add("blk.0.ffn_up.weight", data, "NVFP4").add(f"blk.0.ffn_up{suffix}", scale)
    (weight,) = convert.read_layers(writer.write())
    reference = dequantize(data, GGMLQuantizationType.NVFP4) * scale
    np.testing.assert_array_equal(weight.dequantize().t().numpy(), reference)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Q4_1", "Q4_K"),
        ("Q4_K", "Q4_1"),
        ("IQ2_XXS", "IQ3_XXS"),
        ("NVFP4", "NVFP4"),
        ("Q4_K", "Q4_K"),
        ("Q6_K", "Q6_K"),
    ],
)
def test_two_matrices_that_are_one_layer_keep_their_types_and_scales(first, second, tmp_path) -> None:
    """Two GGUF types of the same weight format may differ in the levels of their scales and in their tables.

    In NVFP4, each tensor has a scale.
    """
    rng, writer, expected = np.random.default_rng(0), Writer(tmp_path / "m.gguf", "gpt-oss"), []
    for part, type_name, factor in (("gate", first, 0.5), ("up", second, 0.25)):
        data = random_blocks(rng, type_name, 2, 8)
        writer.add(f"blk.0.ffn_{part}_exps.weight", data, type_name)
        values = np.stack([dequantize(expert, GGMLQuantizationType[type_name]) for expert in data])
        if type_name == "NVFP4":
            writer.add(f"blk.0.ffn_{part}_exps.scale", np.array([factor, 2 * factor], dtype=np.float32))
            values *= np.array([factor, 2 * factor], dtype=np.float32)[:, None, None]
        expected.append(values)
    layers = convert.read_layers(writer.write(), gguf_names="hf", on_unsupported="dequantize")
    for expert, layer in enumerate(layers):
        assert isinstance(layer, PackedWeight) == (first == second != "NVFP4")
        got = layer.dequantize().t() if isinstance(layer, PackedWeight) else layer.dequantize()
        got = got if got.shape == (16, 512) else got.t()
        both = np.stack([values[expert] for values in expected], axis=1).reshape(16, 512)
        np.testing.assert_array_equal(got.numpy(), both)


def test_an_empty_mxfp4_block_gets_a_scale_in_range(tmp_path) -> None:
    """ggml stores the exponent 0 for a block of zeros. The reader replaces this 0 by 1, and no other exponent."""
    data = random_blocks(np.random.default_rng(0), "MXFP4", 4).reshape(4, 16, 17)
    data[2, 5] = 0
    data[1, 7, 1:], data[1, 7, 0] = 0x88, 255 - 5
    (weight,) = convert.read_layers(Writer(tmp_path / "m.gguf").add("w.weight", data.reshape(4, -1), "MXFP4").write())
    reference = dequantize(data.reshape(4, -1), GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(weight.dequantize().t().numpy(), reference)
    scales = data[..., 0].copy()
    scales[2, 5] = scales[1, 7] = 127
    np.testing.assert_array_equal(weight.scales.t().numpy(), scales)


def test_other_types_are_refused_or_left_out_or_decoded(tmp_path, monkeypatch) -> None:
    rng, type_name = np.random.default_rng(0), "Q6_K"
    monkeypatch.delitem(DECODERS, type_name)  # this type then stands for a future type
    data, ours = random_blocks(rng, type_name, 16), random_blocks(rng, "Q4_0", 16)
    path = Writer(tmp_path / "m.gguf").add("a.weight", ours, "Q4_0").add("b.weight", data, type_name).write()
    with pytest.raises(convert.UnsupportedFormat, match=rf"m\.gguf: tensor 'b\.weight': {type_name} is not"):
        list(convert.read_layers(path))
    assert [weight.name for weight in convert.read_layers(path, on_unsupported="skip")] == ["a"]
    _, dense = convert.read_layers(path, on_unsupported="dequantize")
    assert isinstance(dense, convert.DenseWeight)
    assert type_name in dense.reason
    reference = dequantize(data, GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(dense.weight.numpy(), reference)
    np.testing.assert_array_equal(dense.dequantize().numpy(), reference.T)


@pytest.mark.parametrize("shape", [(), (2, 3, 5)], ids=["vector", "four dimensions"])
def test_a_packed_tensor_that_is_no_matrix_becomes_floats_of_its_shape(shape, tmp_path) -> None:
    data = random_blocks(np.random.default_rng(0), "Q8_0", *shape)
    path = Writer(tmp_path / "m.gguf").add("a.weight", data, "Q8_0").write()
    with pytest.raises(convert.UnsupportedFormat, match="expected a matrix, got shape"):
        list(convert.read_layers(path))
    (dense,) = convert.read_layers(path, on_unsupported="dequantize")
    np.testing.assert_array_equal(dense.weight.numpy(), dequantize(data, GGMLQuantizationType["Q8_0"]))


def rope_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders q and k rows as llama.cpp does: row (head, half, i) becomes row (head, i, half)."""
    size = weight.shape[0] // heads
    out = np.empty_like(weight)
    for row in range(weight.shape[0]):
        head, rest = divmod(row, size)
        half, i = divmod(rest, size // 2)
        out[head * size + 2 * i + half] = weight[row]
    return out


@pytest.mark.parametrize("per_layer", [False, True])
def test_hf_names_and_the_row_order_of_llama(tmp_path, per_layer) -> None:
    rng = np.random.default_rng(0)
    originals = {name: random_blocks(rng, "Q4_1", rows, K=256) for name, rows in [("q", 64), ("k", 32), ("v", 32)]}
    bias = rng.uniform(-1, 1, 64).astype(np.float32)
    writer = Writer(tmp_path / "m.gguf")
    writer.gguf.add_head_count([4, 4] if per_layer else 4)
    writer.gguf.add_head_count_kv([2, 2] if per_layer else 2)
    writer.add("blk.1.attn_q.weight", rope_interleaved(originals["q"], 4), "Q4_1")
    writer.add("blk.1.attn_q.bias", rope_interleaved(bias, 4))
    writer.add("blk.1.attn_k.weight", rope_interleaved(originals["k"], 2), "Q4_1")
    writer.add("blk.1.attn_v.weight", originals["v"], "Q4_1").add("token_embd.weight", np.zeros((8, 8), np.float32))
    path = writer.write()
    reader = convert.open_reader(path, gguf_names="hf")
    weights = {weight.name: weight for weight in reader}
    for name, data in originals.items():
        weight = weights[f"model.layers.1.self_attn.{name}_proj"]
        reference = dequantize(data, GGMLQuantizationType.Q4_1)
        np.testing.assert_array_equal(weight.dequantize().t().numpy(), reference)
        assert weight.b_packed.is_contiguous()
    np.testing.assert_array_equal(weights["model.layers.1.self_attn.q_proj"].bias.numpy(), bias)
    assert [name for name, _ in reader.other_tensors()] == ["model.embed_tokens.weight"]
    plain = {weight.name: weight for weight in convert.read_layers(path)}
    as_stored = dequantize(rope_interleaved(originals["q"], 4), GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(plain["blk.1.attn_q"].dequantize().t().numpy(), as_stored)


def test_split_files_are_read_together_and_a_missing_part_is_named(tmp_path) -> None:
    data = [random_blocks(np.random.default_rng(part), "Q4_0", 8) for part in range(2)]
    for part, blocks in enumerate(data):
        writer = Writer(tmp_path / f"m-{part + 1:05d}-of-00002.gguf")
        writer.gguf.add_uint16("split.count", 2)
        writer.add(f"w{part}.weight", blocks, "Q4_0").write()
    first = tmp_path / "m-00001-of-00002.gguf"
    weights = list(convert.read_layers(first))
    assert [weight.name for weight in weights] == ["w0", "w1"]
    for weight, blocks in zip(weights, data, strict=True):
        reference = dequantize(blocks, GGMLQuantizationType.Q4_0)
        np.testing.assert_array_equal(weight.dequantize().t().numpy(), reference)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(convert.CheckpointError, match=r"part m-00002-of-00002\.gguf is missing"):
        convert.open_reader(first)


def test_a_scale_that_is_not_finite_is_named(tmp_path) -> None:
    data = random_blocks(np.random.default_rng(0), "Q4_0", 8)
    data[3, 18:20] = np.array([np.nan], dtype=np.float16).view(np.uint8)
    path = Writer(tmp_path / "m.gguf").add("w.weight", data, "Q4_0").write()
    with pytest.raises(convert.CheckpointError, match=r"m\.gguf: tensor 'w\.weight': scales: expected finite"):
        list(convert.read_layers(path))


@pytest.mark.parametrize("type_name", ["Q4_0", "NVFP4"])
def test_truncated_at_every_length(tmp_path, type_name) -> None:
    whole = (Path(__file__).parents[1] / "data/layers/gguf" / type_name / "model.gguf").read_bytes()
    damaged = tmp_path / "model.gguf"
    for length in (*range(0, 700), *range(700, len(whole), 499)):
        damaged.write_bytes(whole[:length])
        with pytest.raises(convert.CheckpointError, match=r"model\.gguf: "):
            list(convert.read_layers(damaged))


def test_olmos_biases_stay_where_they_are() -> None:
    """llama.cpp reorders the rows of q and k: for OLMo only in the weights, for Llama also in the biases."""
    heads = {"olmo.attention.head_count": 2, "llama.attention.head_count": 2}
    assert row_order("blk.0.attn_q.bias", "olmo", heads, 64) is None
    for name, architecture in (("weight", "olmo"), ("weight", "llama"), ("bias", "llama")):
        order = row_order(f"blk.0.attn_q.{name}", architecture, heads, 64)
        assert order is not None and order.tolist()[:3] == [0, 2, 4]
