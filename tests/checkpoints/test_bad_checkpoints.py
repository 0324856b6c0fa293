"""If settings and layers contradict each other, one error names the file and the tensor or key."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoint_writers as writers
from tests.support.checkpoint_damage import GPTQ, change, configure, fails
from tests.support.checkpoint_writers import LAYER
from torch_marlin_metal import convert
from torch_marlin_metal.packed_weight import PackedWeight

K, N = 64, 16


@pytest.fixture
def gptq(tmp_path) -> Path:
    writers.write_gptq(tmp_path, np.random.default_rng(1), K, N, 32, version=2)
    return tmp_path


SETTINGS: dict[str, tuple[Any, str, type]] = {
    "text": ("gptq", "config.json: quantization_config: expected an object", convert.CheckpointError),
    "unknown method": (
        {"quant_method": "aqlm"},
        "quant_method 'aqlm' is not read; known: .*gptq",
        convert.UnsupportedFormat,
    ),
    "no method": ({"beans": 4}, "name no quant_method; known: .*awq", convert.UnsupportedFormat),
    "method of the wrong type": (
        {"quant_method": 4},
        "quant_method: expected a string, got 4",
        convert.CheckpointError,
    ),
    "group size of the wrong type": (
        GPTQ | {"group_size": "32"},
        "group_size: expected an integer, got '32'",
        convert.CheckpointError,
    ),
    "group size of true": (GPTQ | {"group_size": True}, "group_size: expected an integer", convert.CheckpointError),
    "another group size": (GPTQ | {"group_size": 16}, "scales.*expected 4 groups of 16", convert.CheckpointError),
    "a huge group size": (GPTQ | {"group_size": 10**40}, "scales.*expected 1 groups", convert.CheckpointError),
    "another width": (GPTQ | {"bits": 8}, "qweight.*4 bits by the shapes .* settings' 8", convert.CheckpointError),
    "marlin": (GPTQ | {"is_marlin_format": True}, "'marlin' is not read", convert.UnsupportedFormat),
    "pack_dtype": (GPTQ | {"pack_dtype": "int8"}, "pack_dtype 'int8' is not read", convert.UnsupportedFormat),
    "awq marlin": ({"quant_method": "awq", "version": "marlin"}, "AWQ version 'marlin'", convert.UnsupportedFormat),
    "awq 3 bit": ({"quant_method": "awq", "bits": 3}, "3-bit AWQ", convert.UnsupportedFormat),
    "compressed-tensors marlin-24": (
        {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}},
        "format 'marlin-24' is not read",
        convert.UnsupportedFormat,
    ),
    "compressed-tensors without groups": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "config_groups: expected at least one",
        convert.CheckpointError,
    ),
    "rotation": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": {"weights": {"num_bits": 4}}},
            "transform_config": {"config_groups": {"u": {"type": "hadamard"}}},
        },
        "transform_config: layers that rotate",
        convert.UnsupportedFormat,
    ),
    "modelopt W4A8": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        "'W4A8_AWQ' is not read",
        convert.UnsupportedFormat,
    ),
    "auto-round of another layout": (
        {"quant_method": "auto-round", "packing_format": "auto_round:bitblas"},
        "packing_format 'auto_round:bitblas' is not read",
        convert.UnsupportedFormat,
    ),
    "another method's layers": ({"quant_method": "hqq"}, r"no tensor's name ends in \.W_q", convert.CheckpointError),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(gptq, case) -> None:
    settings, message, kind = SETTINGS[case]
    configure(gptq, settings)
    fails(gptq, message, kind)


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"", "not valid JSON"), (b"[1]", "expected a JSON object"), (b'{"quantization_config": {', "not valid JSON")],
)
def test_config_file(gptq, text, message) -> None:
    (gptq / "config.json").write_bytes(text)
    fails(gptq, rf"config\.json: {message}")


def test_no_settings_at_all(gptq) -> None:
    (gptq / "config.json").write_text("{}")
    fails(gptq, "no quantization settings: neither config.json", convert.NotQuantized)


def zeros_like(rows: int, columns: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


def scale_of(value: float) -> torch.Tensor:
    scales = torch.ones(2, N, dtype=torch.float32)
    scales[1, 3] = value
    return scales


LAYERS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "scales missing": ({"scales": None}, f"layer '{LAYER}': expected a tensor scales"),
    "codes missing": ({"qweight": None}, "no tensor's name ends in"),
    "qzeros of other groups": ({"qzeros": zeros_like(3, 2)}, rf"tensor '{LAYER}\.qzeros': expected shape \[2, 2\]"),
    "qzeros of other columns": ({"qzeros": zeros_like(2, 3)}, "found 6 by the shapes|expected shape"),
    "qzeros of floats": ({"qzeros": zeros_like(2, 2, torch.float16)}, r"\.qzeros': expected dtype I32, got F16"),
    "scales of other columns": ({"scales": torch.ones(2, N + 8)}, rf"\.scales': expected shape \[any, {N}\]"),
    "scales of other groups": ({"scales": torch.ones(3, N)}, r"\.scales': expected 2 groups of 32 for K=64, got 3"),
    "scales of fewer groups than g_idx names": (
        {"scales": torch.ones(1, N), "qzeros": None, "g_idx": torch.arange(K, dtype=torch.int32) % 2},
        r"\.scales': expected 2 groups of 32 for K=64, got 1",
    ),
    "scales of integers": ({"scales": zeros_like(2, N)}, r"\.scales': expected dtype F16 or BF16 or F32, got I32"),
    "scales of three dimensions": ({"scales": torch.ones(2, N, 1)}, r"\.scales': expected shape"),
    "scales empty": ({"scales": torch.ones(0, N)}, r"\.scales': expected shape \[any, 16\], got \[0, 16\]"),
    "NaN scale": ({"scales": scale_of(float("nan"))}, r"\.scales': scales: expected finite values"),
    "inf scale": ({"scales": scale_of(float("inf"))}, r"\.scales': scales: expected finite values"),
    "scale beyond 2^100": ({"scales": scale_of(2.0**101)}, r"\.scales': scales: expected .* at most 2\^100"),
    "codes of int64": ({"qweight": zeros_like(K // 8, N, torch.int64)}, r"\.qweight': expected dtype I32, got I64"),
    "codes of one dimension": ({"qweight": torch.zeros(8, dtype=torch.int32)}, r"\.qweight': expected shape"),
    "g_idx too large": ({"g_idx": torch.full((K,), 2, dtype=torch.int32)}, r"\.g_idx': expected groups in 0\.\.1"),
    "g_idx negative": (
        {"g_idx": torch.cat([torch.full((1,), -5), torch.zeros(K - 1)]).int()},
        r"\.g_idx': expected groups in 0\.\.1, got a range of -5",
    ),
    "g_idx uneven": (
        {"g_idx": torch.cat([torch.zeros(40), torch.ones(24)]).int()},
        r"\.g_idx': gptq_perm: g_idx: expected 32 rows in group 0 of 2, got 40",
    ),
    "g_idx of another length": ({"g_idx": torch.zeros(K - 1, dtype=torch.int32)}, r"\.g_idx': its 63 rows"),
    "g_idx of floats": ({"g_idx": torch.zeros(K)}, r"\.g_idx': expected dtype I32 or I64, got F32"),
    "bias of another length": ({"bias": torch.zeros(N + 1)}, r"\.bias': expected shape \[16\], got \[17\]"),
    "bias of integers": ({"bias": torch.zeros(N, dtype=torch.int32)}, r"\.bias': expected dtype"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layer(gptq, case) -> None:
    tensors, message = LAYERS[case]
    change(gptq, **tensors)
    fails(gptq, message)


def test_a_symmetric_file_with_the_other_versions_zero_points(tmp_path) -> None:
    for stated, stored in ((1, 2), (2, 1)):
        writers.write_gptq(tmp_path, np.random.default_rng(1), K, N, 32, version=stored, sym=True)
        configure(tmp_path, GPTQ | {"sym": True, "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[stated]})
        fails(
            tmp_path, rf"\.qzeros': the settings say version {stated}.*fit version {stored}: if the settings are wrong"
        )


def test_zero_points_promised_and_absent(gptq) -> None:
    change(gptq, qzeros=None)
    fails(gptq, "the settings say sym=false, but there are no qzeros")


@pytest.mark.parametrize("code", [0, 15, 241, 255])
def test_e8m0_codes_out_of_range(tmp_path, code) -> None:
    writers.write_mxfp4(tmp_path, np.random.default_rng(1), K, N, container="compressed-tensors")
    scales = load_file(tmp_path / "model.safetensors")[f"{LAYER}.weight_scale"]
    scales[3, 1] = code
    change(tmp_path, weight_scale=scales)
    fails(tmp_path, rf"\.weight_scale': scales: expected E8M0 codes in 16\.\.240, got a range of .*\b{code}\b")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_e4m3_nan_codes(tmp_path, code) -> None:
    writers.write_nvfp4(tmp_path, np.random.default_rng(1), K, N, container="compressed-tensors")
    scales = load_file(tmp_path / "model.safetensors")[f"{LAYER}.weight_scale"]
    scales.view(torch.uint8)[3, 1] = code
    change(tmp_path, weight_scale=scales)
    fails(tmp_path, rf"\.weight_scale': scales: expected finite E4M3 codes, got a NaN \(0x{code:02X}\)")


@pytest.mark.parametrize("value", [0.0, float("nan"), 1e-38])
def test_global_scale_that_has_no_usable_inverse(tmp_path, value) -> None:
    writers.write_nvfp4(tmp_path, np.random.default_rng(1), K, N, container="compressed-tensors")
    change(tmp_path, weight_global_scale=torch.tensor([value]))
    fails(tmp_path, r"\.weight_global_scale': global_scale: expected finite values")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hqq_settings_that_are_no_numbers(tmp_path, value) -> None:
    writers.write_hqq(tmp_path, np.random.default_rng(1), K, N, 32)
    change(tmp_path, nbits=torch.tensor(value))
    fails(tmp_path, r"\.nbits': expected a finite number")


def test_layers_that_do_more_than_multiply_are_refused(tmp_path) -> None:
    """Such a layer multiplies its input by a factor, rotates it, or has quantized scales."""
    rng = np.random.default_rng(1)
    writers.write_nvfp4(tmp_path, rng, K, N, container="modelopt")
    change(tmp_path, pre_quant_scale=torch.ones(K))
    fails(tmp_path, f"layer '{LAYER}': it scales its input", convert.UnsupportedFormat)
    writers.write_nvfp4(tmp_path, rng, K, N, container="torchao")
    change(tmp_path, **{"weight.act_pre_scale": torch.ones(K)})
    fails(tmp_path, f"layer '{LAYER}': it scales its input", convert.UnsupportedFormat)
    writers.write_hqq(tmp_path, rng, K, N, 32)
    change(tmp_path, quant_zero=torch.tensor(1, dtype=torch.uint8))
    fails(tmp_path, f"layer '{LAYER}': its scales or zero points are themselves", convert.UnsupportedFormat)
    rotated = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "group_size": 32}
    writers.write_gptq(tmp_path, rng, K, N, 32, config=rotated | {"rotation_config": {"kind": "hadamard"}})
    fails(tmp_path, "rotation_config: layers that rotate", convert.UnsupportedFormat)


def test_parts_of_a_layer_without_its_codes(gptq) -> None:
    tensors = load_file(gptq / "model.safetensors")
    save_file(tensors | {"other.scales": torch.ones(2, 2)}, gptq / "model.safetensors")
    fails(gptq, r"tensor 'other\.scales': gptq: scales of a layer without other\.qweight")


def test_layers_quantized_in_another_way_are_named(tmp_path) -> None:
    writers.write_compressed_tensors(tmp_path, np.random.default_rng(1), K, N, 32)
    tensors = load_file(tmp_path / "model.safetensors")
    eight_bit = {"head.weight": torch.zeros(4, 4).to(torch.float8_e5m2), "head.weight_scale": torch.ones(4, 1)}
    save_file(tensors | eight_bit, tmp_path / "model.safetensors")
    fails(tmp_path, "layer 'head': E5M2 weights", convert.UnsupportedFormat)
    reader = convert.open_reader(tmp_path, on_unsupported="skip")
    assert [weight.name for weight in reader] == [LAYER]
    assert list(reader.other_tensors()) == []
    save_file(tensors | eight_bit | {"head.weight_scale": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    fails(tmp_path, r"head.weight_scale': \[2, 2\] does not agree")
    save_file(tensors | {"head.weight_scale": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    fails(tmp_path, "layer 'head': expected a tensor weight, found only weight_scale")


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.linspace(0.1, 1, 4)[:, None]])
def test_fp8_layers_beside_4_bit_ones_are_packed(tmp_path, scale) -> None:
    writers.write_nvfp4(tmp_path, np.random.default_rng(1), K, N, container="modelopt")
    tensors = load_file(tmp_path / "model.safetensors")
    codes = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    eight_bit = {"head.weight": codes, "head.weight_scale": scale.to(torch.bfloat16), "head.bias": torch.ones(4)}
    save_file(tensors | eight_bit, tmp_path / "model.safetensors")
    weights = {weight.name: weight for weight in convert.read_layers(tmp_path)}
    assert torch.equal(weights["head"].dequantize().t(), codes.float() * scale.to(torch.bfloat16).float())
    assert torch.equal(weights["head"].bias, torch.ones(4))
    assert isinstance(weights[LAYER], PackedWeight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_unsupported": "ignore"}, "on_unsupported: expected None, 'error', 'dequantize' or 'skip', got 'ignore'"),
        ({"gptq_zeros_rule": "x"}, "gptq_zeros_rule: expected"),
        ({"gptq_version": 3}, "gptq_version: expected None, 1 or 2, got 3"),
        ({"gguf_names": "x"}, "gguf_names: expected"),
    ],
)
def test_options(gptq, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        list(convert.read_layers(gptq, **options))
