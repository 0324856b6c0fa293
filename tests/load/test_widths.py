"""Weights of 5 to 8 bits stay packed in every format; layers that no format can represent are decoded or refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from safetensors.torch import save_file

from tests.integrations.test_beside_transformers import scheme
from torch_marlin_metal import convert
from torch_marlin_metal.checkpoints import checkpoint
from torch_marlin_metal.checkpoints.errors import NothingPacked
from torch_marlin_metal.checkpoints.formats import mlx
from torch_marlin_metal.checkpoints.part import Part
from torch_marlin_metal.load.caller import Caller
from torch_marlin_metal.load.loader import Loader
from torch_marlin_metal.packed_weight import PackedWeight

N, K = 40, 96
OTHER = "model.layers.0.mlp.down_proj"
RNG = np.random.default_rng(3)
E4M3 = torch.from_numpy(RNG.normal(size=(N, K))).to(torch.float8_e4m3fn)
INT8 = torch.from_numpy(RNG.integers(-128, 128, (N, K))).to(torch.int8)
ROWS = torch.from_numpy(RNG.uniform(0.1, 1, (N, 1))).float()
CT, MODELOPT = {"quant_method": "compressed-tensors"}, {"quant_method": "modelopt"}


def wide(value: torch.Tensor) -> np.ndarray:
    return value.double().numpy()


def by_block(scale: torch.Tensor, rows: int, columns: int) -> np.ndarray:
    return wide(scale).repeat(rows, 0).repeat(columns, 1)[:N, :K]


def of_bits(bits: int) -> tuple:
    """Packs like compressed-tensors, with one scale per row."""
    codes = torch.from_numpy(RNG.integers(-(1 << bits - 1), 1 << bits - 1, (N, K))).to(torch.int8)
    stored = {"weight_packed": pack_to_int32(codes, bits), "weight_scale": ROWS, "weight_shape": torch.tensor([N, K])}
    return stored, scheme("pack-quantized", bits), wide(codes) * wide(ROWS)


def of_hqq(bits: int, axis: int) -> tuple:
    """Packs with HQQ's own quantizer, and decodes with its decoder."""
    linear = torch.nn.Linear(K, N, bias=False)
    config = BaseQuantizeConfig(nbits=bits, group_size=32, axis=axis)
    layer = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu", initialize=True)
    state = {key: value for key, value in layer.state_dict().items() if isinstance(value, torch.Tensor)}
    return state, {"quant_method": "hqq"}, wide(layer.dequantize())


def tiles_of_scales(codes: torch.Tensor) -> torch.Tensor:
    """Returns codes in torchao's order for tensor cores: tiles of 128 x 4 codes, each stored as 32 x 16."""
    stored = np.zeros((128, 4), np.uint8)
    stored[: codes.shape[0], : codes.shape[1]] = codes.numpy()
    order = [[stored[32 * (k // 4) + n, k % 4] for k in range(16)] for n in range(32)]
    return torch.tensor(np.array(order))


def cases() -> dict[str, tuple]:
    """Returns for each case the tensors of one layer, the settings, and the decoded weight in fp64."""
    exponents = torch.from_numpy(RNG.integers(118, 130, (N, K // 32))).to(torch.uint8)
    groups, tiles = 2.0 ** (wide(exponents) - 127), torch.from_numpy(RNG.uniform(0.1, 1, (2, 3))).float()
    points = torch.from_numpy(RNG.integers(-9, 9, (N, 1))).to(torch.int8)
    largest = torch.from_numpy(RNG.uniform(1, 3, N)).float()
    one = torch.tensor(0.37)
    tiled = CT | {"format": "float-quantized"}
    tiled["config_groups"] = {"g": {"weights": {"num_bits": 8, "type": "float", "block_structure": [32, 32]}}}
    mixed = MODELOPT | {"quant_algo": "MIXED_PRECISION"}
    in_groups = scheme("int-quantized")
    in_groups["config_groups"] = {"g": {"weights": {"num_bits": 8, "type": "int", "group_size": 64}}}
    return {
        **{f"compressed-tensors int{bits}": of_bits(bits) for bits in (5, 6, 7, 8)},
        "float-quantized": ({"weight": E4M3, "weight_scale": ROWS}, scheme("float-quantized"), wide(E4M3) * wide(ROWS)),
        "float-quantized in blocks": (
            {"weight": E4M3, "weight_scale": tiles}, tiled, wide(E4M3) * by_block(tiles, 32, 32)
        ),
        "int-quantized": ({"weight": INT8, "weight_scale": ROWS}, scheme("int-quantized"), wide(INT8) * wide(ROWS)),
        "int-quantized, asymmetric": (
            {"weight": INT8, "weight_scale": ROWS, "weight_zero_point": points},
            scheme("int-quantized"),
            (wide(INT8) - wide(points)) * wide(ROWS),
        ),
        "mxfp8-quantized": (
            {"weight": E4M3, "weight_scale": exponents}, scheme("mxfp8-quantized"), wide(E4M3) * groups.repeat(32, 1)
        ),
        "modelopt FP8": ({"weight": E4M3, "weight_scale": one}, mixed, wide(E4M3) * float(one)),
        "modelopt FP8_PB_WO": (
            {"weight": E4M3, "weight_scale": one.reshape(1, 1, 1, 1)}, MODELOPT | {"quant_algo": "FP8_PB_WO"},
            wide(E4M3) * float(one),
        ),
        "auto-round FP8": (
            {"weight": E4M3, "weight_scale": ROWS[:, 0], "input_scale": one.reshape(1)},
            {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "bits": 8, "data_type": "fp"},
            wide(E4M3) * wide(ROWS),
        ),
        "auto-round FP8 in blocks": (
            {"weight": E4M3, "weight_scale_inv": tiles},
            {"quant_method": "auto-round", "bits": 8, "data_type": "fp", "group_size": [32, 32]},
            wide(E4M3) * by_block(tiles, 32, 32),
        ),
        "fp8 in blocks": (
            {"weight": E4M3, "weight_scale_inv": tiles},
            {"quant_method": "fp8", "weight_block_size": [32, 32]},
            wide(E4M3) * by_block(tiles, 32, 32),
        ),
        "LLM.int8": (
            {"weight": INT8, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)},
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            wide(INT8) * wide(largest)[:, None] / 127,
        ),
        "torchao Float8Tensor": (
            {"weight.qdata": E4M3, "weight.scale": ROWS}, {"quant_method": "torchao"}, wide(E4M3) * wide(ROWS)
        ),
        "torchao Int8Tensor": (
            {"weight.qdata": INT8, "weight.scale": ROWS}, {"quant_method": "torchao"}, wide(INT8) * wide(ROWS)
        ),
        "fp8 in rows' blocks": (
            {"weight": E4M3, "weight_scale_inv": ROWS.repeat(1, 2) * torch.tensor([1.0, 3.0])},
            {"quant_method": "fp8", "weight_block_size": [1, 64]},
            wide(E4M3) * (wide(ROWS) * np.array([1.0, 3.0])).repeat(64, 1)[:, :K],
        ),
        "int-quantized in groups": (
            {"weight": INT8, "weight_scale": ROWS.repeat(1, 2) * torch.tensor([1.0, 3.0]),
             "weight_g_idx": torch.full((K,), -1, dtype=torch.int32)},
            in_groups,
            wide(INT8) * (wide(ROWS) * np.array([1.0, 3.0])).repeat(64, 1)[:, :K],
        ),
        "torchao MXTensor": (
            {"weight.qdata": E4M3, "weight.scale": exponents}, {"quant_method": "torchao"},
            wide(E4M3) * groups.repeat(32, 1),
        ),
        "torchao MXTensor with tiles of scales": (
            {"weight.qdata": E4M3, "weight.scale": tiles_of_scales(exponents)}, {"quant_method": "torchao"},
            wide(E4M3) * groups.repeat(32, 1),
        ),
        "hqq 8 bit": of_hqq(8, 1),
        "fp8 in one tensor": (
            {"weight": E4M3, "weight_scale_inv": one}, {"quant_method": "fp8"}, wide(E4M3) * float(one)
        ),
        "fp8 with exponents": (
            {"weight": E4M3, "weight_scale_inv": exponents[:2, :3].view(torch.float8_e8m0fnu)},
            {"quant_method": "fp8", "weight_block_size": [32, 32]},
            wide(E4M3) * (2.0 ** (wide(exponents[:2, :3]) - 127)).repeat(32, 0).repeat(32, 1)[:N, :K],
        ),
        "quanto": (
            {"weight._data": INT8, "weight._scale": ROWS}, {"quant_method": "quanto"}, wide(INT8) * wide(ROWS)
        ),
        "comfyui": (
            {"weight": E4M3, "weight_scale": one, "comfy_quant": as_text({"format": "float8_e4m3fn"})},
            {"quant_method": "comfyui"}, wide(E4M3) * float(one),
        ),
    }  # fmt: skip


def as_text(value: dict) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def floats() -> dict[str, tuple]:
    """Returns cases like those of `cases`, but of weights that no weight format can represent, each with the reason."""
    e5m2 = torch.from_numpy(RNG.normal(size=(N, K))).to(torch.float8_e5m2)
    columns, one = torch.from_numpy(RNG.uniform(0.5, 3, K)).float(), torch.tensor(0.37)
    short = E4M3[:, :92].contiguous()
    small = ROWS.repeat(1, K // 8) * torch.linspace(1, 2, K // 8)
    in_eights = scheme("int-quantized")
    in_eights["config_groups"]["group_0"]["weights"] |= {"group_size": 8}
    return {
        "E5M2": (
            {"weight": e5m2, "weight_scale": ROWS}, scheme("float-quantized"), wide(e5m2) * wide(ROWS), "E5M2"
        ),
        "torchao E5M2": (
            {"weight.qdata": e5m2, "weight.scale": ROWS}, {"quant_method": "torchao"}, wide(e5m2) * wide(ROWS), "E5M2"
        ),
        "scaled inputs": (
            {"weight": E4M3, "weight_scale": one, "pre_quant_scale": columns},
            MODELOPT | {"quant_algo": "FP8"}, wide(E4M3) * float(one) * wide(columns), "scales its input",
        ),
        "K=92": (
            {"weight": short, "weight_scale": ROWS}, scheme("float-quantized"), wide(short) * wide(ROWS), "K=92",
        ),
        "groups of 8": (
            {"weight": INT8, "weight_scale": small}, in_eights, wide(INT8) * wide(small).repeat(8, 1), "groups of 8"
        ),
        "hqq, axis 0": (*of_hqq(8, 0), "axis=0"),
    }  # fmt: skip


CASES, FLOATS = cases(), floats()


def one_layer(path: Path, tensors: dict, settings: dict, **config) -> None:
    path.mkdir(exist_ok=True)
    save_file({f"{OTHER}.{key}": value.contiguous() for key, value in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": settings, **config}))


def attributes(name: str) -> dict:
    if not name.startswith("torchao"):
        return {}
    return {"tensor_attributes": {"class": "Float8Tensor" if "E5M2" in name else name.split()[1]}}


@pytest.mark.parametrize("name", CASES)
def test_each_format_is_packed_as_its_producer_means_it(name, tmp_path) -> None:
    tensors, settings, expected = CASES[name]
    one_layer(tmp_path, tensors, settings, **attributes(name))
    (weight,) = convert.read_layers(tmp_path)
    assert isinstance(weight, PackedWeight) and (weight.name, weight.K, weight.N) == (OTHER, K, N)
    assert weight.b_packed.shape == (K // (8 if "b_high" in weight.tensors() else 4), N)
    np.testing.assert_allclose(weight.dequantize().t().numpy(), expected, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("name", FLOATS)
def test_what_no_weight_format_holds_is_named_and_decoded(name, tmp_path, monkeypatch) -> None:
    tensors, settings, expected, reason = FLOATS[name]
    one_layer(tmp_path, tensors, settings, **attributes(name))
    (decoded,) = convert.read_layers(tmp_path, on_unsupported="dequantize")
    assert isinstance(decoded, convert.DenseWeight) and reason in decoded.kind
    np.testing.assert_allclose(decoded.weight.numpy(), expected, rtol=2.0**-22, atol=0)
    with pytest.raises(convert.UnsupportedFormat, match=f"layer '{OTHER}'.*{reason}.* decodes it to floats"):
        list(convert.read_layers(tmp_path))
    monkeypatch.setattr(checkpoint, "read_tensor", None)
    found = convert.open_reader(tmp_path).refusals([0], whole=False)
    assert {index: one.kind for index, one in found.items()} == (
        # the axis is a number in a tensor, which the headers do not show
        {} if name == "hqq, axis 0" else {0: decoded.kind}
    )


def test_a_process_that_loads_parts_is_told_of_floats_before(tmp_path) -> None:
    tensors, settings, _, _ = FLOATS["E5M2"]
    one_layer(tmp_path, tensors, settings)
    model = torch.nn.Module()
    model.add_module("up", torch.nn.Linear(K, N, bias=False))
    told: list[str] = []
    caller = Caller(op="load", find=lambda name: name.replace(OTHER, "up"), parts=True)
    Loader(model, convert.open_reader(tmp_path), caller, told.append)
    assert len(told) == 1 and "100% of the bytes of its matrices have no weight format" in told[0]


@pytest.mark.parametrize(
    ("tensors", "settings", "kind", "reason"),
    [
        (
            {"weight": INT8, "SCB": torch.ones(N), "weight_format": torch.tensor(2, dtype=torch.uint8)},
            {"quant_method": "bitsandbytes", "load_in_8bit": True}, None, "the order of a GPU's tiles",
        ),
        (
            {"weight": INT8, "weight_scale": torch.ones(N, 3), "weight_g_idx": torch.arange(K).flip(0) // 32},
            scheme("int-quantized"), None, "act-order",
        ),
        (
            {"weight.qdata": INT8, "weight.scale": ROWS, "weight.act_pre_scale": torch.ones(K)},
            {"quant_method": "torchao"}, "Int8Tensor", "act_pre_scale",
        ),
    ],
)  # fmt: skip
def test_what_is_not_decoded_is_refused(tensors, settings, kind, reason, tmp_path) -> None:
    one_layer(tmp_path, tensors, settings, **({"tensor_attributes": {"class": kind}} if kind else {}))
    with pytest.raises(convert.UnsupportedFormat, match=reason):
        list(convert.read_layers(tmp_path, on_unsupported="dequantize"))


def test_an_exponent_out_of_range_is_named_unless_its_block_is_empty(tmp_path) -> None:
    exponents, codes = torch.full((N, K // 32), 127, dtype=torch.uint8), E4M3.clone()
    exponents[0, 1], codes[0, 32:64] = 0, 0
    one_layer(tmp_path, {"weight": codes, "weight_scale": exponents}, scheme("mxfp8-quantized"))
    (weight,) = convert.read_layers(tmp_path)
    np.testing.assert_array_equal(weight.dequantize().t().numpy(), codes.float().numpy())
    exponents[0, 2] = 255
    one_layer(tmp_path, {"weight": codes, "weight_scale": exponents}, scheme("mxfp8-quantized"))
    with pytest.raises(convert.CheckpointError, match=f"{OTHER}.weight_scale'.*expected E8M0 codes in 16..240"):
        list(convert.read_layers(tmp_path))


def test_codes_that_are_nan_stay_nan(tmp_path) -> None:
    codes = E4M3.view(torch.uint8).clone()
    codes[3, 5], codes[4, 6] = 0x7F, 0xFF
    one_layer(tmp_path, {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": ROWS}, scheme("float-quantized"))
    (weight,) = convert.read_layers(tmp_path)
    assert weight.dequantize().isnan().nonzero().tolist() == [[5, 3], [6, 4]]


@pytest.mark.parametrize("kind", mlx.REFUSED)
def test_models_of_mlx_that_are_not_read_are_refused_with_the_reason(kind, tmp_path) -> None:
    save_file({f"{OTHER}.scales": torch.ones(N, 1)}, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    config = {"model_type": kind, "quantization": {"bits": 4, "group_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(convert.UnsupportedFormat, match=f"{re.escape(mlx.REFUSED[kind])}; quantize"):
        convert.open_reader(tmp_path)


def test_scales_that_do_not_fit_are_named(tmp_path) -> None:
    tensors = {"weight": E4M3, "weight_scale_inv": torch.ones(3, 3)}
    one_layer(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    with pytest.raises(convert.CheckpointError, match=rf"{OTHER}.weight_scale_inv': \[3, 3\] does not agree with"):
        list(convert.read_layers(tmp_path))


@pytest.mark.parametrize("scale", [torch.ones(3), torch.ones(1, N)])
def test_scales_of_no_known_shape_are_refused(scale, tmp_path) -> None:
    """Three numbers may be scales of q, k and v; N numbers in one row may be scales of rows or of columns."""
    one_layer(tmp_path, {"weight": E4M3, "weight_scale": scale}, MODELOPT | {"quant_algo": "FP8"})
    with pytest.raises(convert.CheckpointError, match=rf"{OTHER}.weight_scale': \[.*\]"):
        list(convert.read_layers(tmp_path, on_unsupported="dequantize"))


def test_floats_beside_scales_of_fp8_stay_floats(tmp_path) -> None:
    one_layer(tmp_path, {"weight": torch.ones(N, K), "weight_scale_inv": torch.ones(1, 1)}, {"quant_method": "fp8"})
    with pytest.raises(NothingPacked, match="all its weights are floats"):
        convert.open_reader(tmp_path)


def test_a_tensor_may_have_the_name_of_a_layer_of_codes(tmp_path) -> None:
    save_file({f"{OTHER}.scale.weight": E4M3, f"{OTHER}.scale": torch.ones(3)}, tmp_path / "m.safetensors")
    (weight,) = convert.read_layers(tmp_path / "m.safetensors")
    assert (weight.name, weight.weight_format) == (f"{OTHER}.scale", "float8_e4m3")


def test_a_file_of_comfyui_is_read_by_its_own_name(tmp_path) -> None:
    """The older kind of file has a marker, one scale per matrix, and no configuration."""
    tensors = {
        f"{OTHER}.weight": E4M3,
        f"{OTHER}.scale_weight": torch.tensor(0.5),
        f"{OTHER}.scale_input": torch.ones(1),
    }
    tensors |= {"scaled_fp8": torch.zeros(0).to(torch.float8_e4m3fn), "norm.weight": torch.ones(4)}
    path = tmp_path / "flux.safetensors"
    save_file(tensors, path)
    for place in (path, tmp_path):
        reader = convert.open_reader(place)
        (weight,) = reader
        np.testing.assert_array_equal(weight.dequantize().t().numpy(), wide(E4M3) * 0.5)
        assert [name for name, _ in reader.other_tensors()] == ["norm.weight"]
    for stated, reason in (
        ({"format": "svdquant"}, "'svdquant' is not read"),
        ({"convrot": True}, "states convrot"),
        ({"orig_shape": [N - 1, K]}, rf"matrix \[{N - 1}, {K}\] is padded to \[{N}, {K}\]"),
    ):
        text = {
            f"{OTHER}.weight": E4M3,
            f"{OTHER}.weight_scale": torch.tensor(0.5),
            f"{OTHER}.comfy_quant": as_text(stated),
        }
        save_file(text, path)
        with pytest.raises(convert.UnsupportedFormat, match=reason):
            list(convert.read_layers(path))
        layers = {"layers": {OTHER: stated}}
        del text[f"{OTHER}.comfy_quant"]
        save_file(text, path, {"_quantization_metadata": json.dumps(layers)})
        with pytest.raises(convert.UnsupportedFormat, match=reason):
            list(convert.read_layers(path))


@pytest.mark.parametrize("folder", ["gptq/autoround-8bit-asym-g64", "gptq/autoround-8bit-sym-g32"])
def test_a_part_of_a_layer_of_8_bit_is_read_alone(folder) -> None:
    reader = convert.open_reader(Path(__file__).parents[1] / "data/layers" / folder)
    (whole,) = (weight.dequantize() for weight in reader)
    for rank in range(2):
        part = reader.read_part(0, Part("columns", 2, rank))
        assert part is not None and torch.equal(part.dequantize(), whole[:, 16 * rank : 16 * rank + 16])
        part = reader.read_part(0, Part("rows", 2, rank))
        assert part is not None and torch.equal(part.dequantize(), whole[128 * rank : 128 * rank + 128])


def test_few_bits_of_quanto_are_refused_by_name() -> None:
    folder = Path(__file__).parents[1] / "data/layers/quanto/qint4"
    with pytest.raises(convert.UnsupportedFormat, match="quanto's weights of 2 and 4 bits are not read"):
        list(convert.read_layers(folder))


def test_experts_of_transformers_fp8_are_a_stack(tmp_path) -> None:
    """The names are those of transformers' Fp8Quantize. The other layer is MXFP4 in bytes."""
    codes = torch.stack([E4M3.view(torch.uint8), E4M3.view(torch.uint8).flip(0)]).view(torch.float8_e4m3fn)
    tiles = torch.from_numpy(RNG.uniform(0.1, 1, (2, 2, 3))).float()
    four = torch.from_numpy(RNG.integers(0, 256, (N, K // 2))).to(torch.uint8)
    exponents = torch.from_numpy(RNG.integers(118, 130, (N, K // 32))).to(torch.uint8)
    save_file(
        {
            "mlp.experts.down_proj": codes,
            "mlp.experts.down_proj_scale_inv": tiles,
            "mlp.up.weight": four.view(torch.int8),
            "mlp.up.weight_scale_inv": exponents,
        },
        tmp_path / "model.safetensors",
    )
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    found = {weight.name: weight for weight in convert.read_layers(tmp_path)}
    assert sorted(found) == ["mlp.experts.down_proj.0", "mlp.experts.down_proj.1", "mlp.up"]
    for expert in range(2):
        weight = found[f"mlp.experts.down_proj.{expert}"].dequantize().t()
        np.testing.assert_array_equal(
            weight.numpy(), (wide(codes[expert]) * by_block(tiles[expert], 32, 32)).astype(np.float32)
        )
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = table[np.stack([four.numpy() & 15, four.numpy() >> 4], 2).reshape(N, K)]
    expected = values * 2.0 ** (wide(exponents).repeat(32, 1) - 127)
    np.testing.assert_array_equal(found["mlp.up"].dequantize().t().numpy(), expected)
