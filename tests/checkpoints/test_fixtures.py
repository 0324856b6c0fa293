"""Each layer in tests/data/layers, which another program wrote, decodes to that program's own weight."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts import checkpoint_tables, page_section
from tests.support.fixture_layers import DATA, FOLDERS, key, source_of
from torch_marlin_metal import WEIGHT_FORMATS, convert
from torch_marlin_metal.checkpoints.known_formats import FORMATS
from torch_marlin_metal.packed_weight import PackedWeight

# The exact representation of each folder's layer: (weight format, group size, dtype of the scales).
EXPECTED = {
    "gptq/autogptq-asym-g128": ("uint4", 128, torch.float32),
    "gptq/autoround-asym-g64-v1-zero0": ("uint4", 64, torch.float16),
    "gptq/autoround-sym-g32": ("uint4b8", 32, torch.float16),
    "gptq/gptqmodel-asym-g64-v1": ("uint4", 64, torch.float16),
    "gptq/gptqmodel-asym-g64-v1-zero0": ("uint4", 64, torch.float16),
    "gptq/gptqmodel-asym-g64-v2": ("uint4", 64, torch.float16),
    "gptq/gptqmodel-sym-g128-v1": ("uint4b8", 128, torch.float16),
    "gptq/gptqmodel-sym-g32-actorder-v1": ("uint4b8", 32, torch.float16),
    "gptq/gptqmodel-sym-gm1-v1": ("uint4b8", 256, torch.float16),
    "awq/autoawq-gemm-asym-g32": ("uint4", 32, torch.float16),
    "awq/autoawq-gemv-asym-g64": ("uint4", 64, torch.float16),
    "awq/autoawq-gemv_fast-asym-g64": ("uint4", 64, torch.float16),
    "awq/autoround-asym-g32": ("uint4", 32, torch.float16),
    "awq/gptqmodel-gemm-asym-g64": ("uint4", 64, torch.bfloat16),
    "auto-round/autoround-asym-g64": ("uint4", 64, torch.float16),
    "auto-round/autoround-asym-2bit-g64": ("uint4", 64, torch.float16),
    "auto-round/autoround-sym-3bit-g32": ("uint4b8", 32, torch.float16),
    "gptq_planar/gptqmodel-asym-3bit-g64": ("uint4", 64, torch.float16),
    "mlx/affine-2bit-g64-float16": ("uint4_bias", 64, torch.float16),
    "mlx/affine-3bit-g32-bfloat16": ("uint4_bias", 32, torch.bfloat16),
    "compressed-tensors/gptq-int4-sym-g32-static": ("uint4b8", 32, torch.float16),
    "compressed-tensors/int4-asym-g64": ("uint4", 64, torch.float16),
    "compressed-tensors/int4-sym-channel": ("uint4b8", 256, torch.float16),
    "compressed-tensors/int4-sym-g128": ("uint4b8", 128, torch.float16),
    "compressed-tensors/mxfp4": ("mxfp4", 32, torch.uint8),
    "compressed-tensors/nvfp4": ("nvfp4", 16, torch.uint8),
    "bitsandbytes/fp4": ("lut4", 64, torch.float32),
    "bitsandbytes/nf4": ("lut4", 64, torch.float32),
    "bitsandbytes/nf4-doublequant": ("lut4", 64, torch.float32),
    "gguf/MXFP4": ("mxfp4", 32, torch.uint8),
    "gguf/NVFP4": ("nvfp4", 16, torch.uint8),
    "gguf/Q4_0": ("uint4b8", 32, torch.float16),
    "gguf/Q4_1": ("uint4_bias", 32, torch.float16),
    "gguf/Q4_K": ("uint4_bias", 32, torch.uint8),
    "hqq/axis1-g64-float16": ("uint4", 64, torch.float16),
    "mlx/affine-g128-float32": ("uint4_bias", 128, torch.float32),
    "mlx/affine-g32-float16": ("uint4_bias", 32, torch.float16),
    "mlx/affine-g64-bfloat16": ("uint4_bias", 64, torch.bfloat16),
    "mlx/mlxlm-affine-g64": ("uint4_bias", 64, torch.float16),
    "mlx/mxfp4-g32-bfloat16": ("mxfp4", 32, torch.uint8),
    "mlx/nvfp4-g16-bfloat16": ("nvfp4", 16, torch.uint8),
    "mlx/nvfp4-global-scale": ("nvfp4", 16, torch.uint8),
    "torchao/intx-int4-g64-unpacked": ("uint4b8", 64, torch.float32),
    "torchao/mxfp4": ("mxfp4", 32, torch.uint8),
    "torchao/nvfp4": ("nvfp4", 16, torch.uint8),
    "auto-round/autoround-8bit-asym-g64": ("uint8", 64, torch.float16),
    "auto-round/autoround-8bit-sym-g32": ("uint8b128", 32, torch.float16),
    "awq/gptqmodel-gemm-8bit-asym-g64": ("uint8", 64, torch.float16),
    "awq/gptqmodel-gemm-8bit-sym-g128": ("uint8b128", 128, torch.float16),
    "bitsandbytes/int8": ("uint8b128", 256, torch.float32),
    "bitsandbytes/int8-large": ("uint8b128", 256, torch.float32),
    "comfyui/float8-bias": ("float8_e4m3", 72, torch.float32),
    "comfyui/float8-metadata": ("float8_e4m3", 40, torch.float32),
    "comfyui/int8-rows": ("uint8b128", 72, torch.float32),
    "comfyui/int8-tensor": ("uint8b128", 72, torch.float32),
    "comfyui/mxfp8": ("mxfp8", 32, torch.uint8),
    "compressed-tensors/fp8-block": ("float8_e4m3", 128, torch.bfloat16),
    "compressed-tensors/fp8-channel": ("float8_e4m3", 256, torch.bfloat16),
    "compressed-tensors/fp8-tensor": ("float8_e4m3", 256, torch.float32),
    "compressed-tensors/mxfp8-edges": ("mxfp8", 32, torch.uint8),
    "compressed-tensors/mxfp8": ("mxfp8", 32, torch.uint8),
    "compressed-tensors/w8a16-asym-g64": ("uint8", 64, torch.bfloat16),
    "compressed-tensors/w8a16-sym-channel": ("uint8b128", 256, torch.bfloat16),
    "compressed-tensors/w8a8-int8-asym-channel": ("uint8", 256, torch.bfloat16),
    "compressed-tensors/w8a8-int8-channel": ("uint8b128", 256, torch.bfloat16),
    "fp8/transformers-16x128": ("float8_e4m3", 128, torch.float32),
    "fp8/transformers-16x128-ue8m0": ("float8_e4m3", 128, torch.bfloat16),
    "gguf/Q5_0": ("uint5b16", 32, torch.float16),
    "gguf/Q5_1": ("uint5_bias", 32, torch.float16),
    "gguf/Q5_K": ("uint5_bias", 32, torch.uint8),
    "gguf/Q6_K": ("uint6b32", 16, torch.int8),
    "gguf/Q8_0-edges": ("uint8b128", 32, torch.float16),
    "gguf/Q8_0": ("uint8b128", 32, torch.float16),
    "gptq/autoround-8bit-asym-g64": ("uint8", 64, torch.float16),
    "gptq/autoround-8bit-sym-g32": ("uint8b128", 32, torch.float16),
    "hqq/axis1-8bit-g32": ("uint8", 32, torch.float16),
    "hqq/axis1-8bit-g64": ("uint8", 64, torch.float16),
    "mlx/affine-5bit-g32-float16": ("uint5_bias", 32, torch.float16),
    "mlx/affine-6bit-g64-bfloat16": ("uint6_bias", 64, torch.bfloat16),
    "mlx/affine-8bit-g32-float16": ("uint8_bias", 32, torch.float16),
    "mlx/affine-8bit-g64-bfloat16": ("uint8_bias", 64, torch.bfloat16),
    "mlx/mxfp8-bfloat16": ("mxfp8", 32, torch.uint8),
    "modelopt/fp8-blocks": ("float8_e4m3", 128, torch.float32),
    "modelopt/fp8-channel": ("float8_e4m3", 256, torch.float32),
    "modelopt/fp8-tensor": ("float8_e4m3", 256, torch.float32),
    "quanto/qfloat8-fp32-bias": ("float8_e4m3", 72, torch.float32),
    "quanto/qint8-bf16-bias": ("uint8b128", 72, torch.bfloat16),
    "quanto/qfloat8": ("float8_e4m3", 256, torch.bfloat16),
    "quanto/qint8": ("uint8b128", 256, torch.float16),
    "torchao/float8-tensor-bias": ("float8_e4m3", 72, torch.float32),
    "torchao/mxfp8-swizzled": ("mxfp8", 32, torch.uint8),
    "torchao/float8-rows": ("float8_e4m3", 256, torch.float32),
    "torchao/int8-g32": ("uint8b128", 32, torch.float32),
    "torchao/int8-rows": ("uint8b128", 256, torch.float32),
    "torchao/intx-int8-g32": ("uint8b128", 32, torch.float32),
    "torchao/mxfp8": ("mxfp8", 32, torch.uint8),
}


def test_every_folder_has_an_expectation() -> None:
    assert sorted(EXPECTED) == [key(folder) for folder in FOLDERS]


@pytest.mark.filterwarnings("ignore:.*raw zero points of 15")
@pytest.mark.parametrize("folder", FOLDERS, ids=key)
def test_layer_equals_the_producers_own_weight(folder: Path) -> None:
    source = source_of(folder)
    (weight,) = convert.read_layers(source)
    assert isinstance(weight, PackedWeight)
    (name, reference), *rest = load_file(folder / "reference.safetensors").items()
    assert not rest
    assert weight.name == "blk.0.attn_k" if source.suffix == ".gguf" else f"{weight.name}.weight" == name
    expected = EXPECTED[key(folder)]
    assert (weight.weight_format, weight.group_size, weight.scales.dtype) == expected
    assert tuple(reference.shape) == (weight.N, weight.K)
    # Other programs' decoders that return fp16 or bf16 round each weight once, to nearest even. So does this
    # conversion.
    decoded = weight.dequantize().t().to(reference.dtype)
    torch.testing.assert_close(decoded, reference, rtol=0, atol=0, equal_nan=True)
    if source.suffix != ".gguf":
        bias = load_file(folder / "model.safetensors").get(f"{weight.name}.bias")
        assert (weight.bias is None) == (bias is None)
        assert bias is None or torch.equal(weight.bias, bias)


def test_a_layout_that_depends_on_the_processor_is_refused_by_name() -> None:
    folder = DATA / "torchao/int4-opaque-cpu-g64"
    with pytest.raises(convert.UnsupportedFormat, match=r"Int4OpaqueTensor.*depends on the processor"):
        list(convert.read_layers(folder))
    with pytest.raises(convert.UnsupportedFormat, match="Int4OpaqueTensor"):
        list(convert.read_layers(folder, on_unsupported="dequantize"))
    assert list(convert.read_layers(folder, on_unsupported="skip")) == []


def test_act_order_is_undone() -> None:
    (weight,) = convert.read_layers(DATA / "gptq/gptqmodel-sym-g32-actorder-v1")
    assert isinstance(weight, PackedWeight)
    assert weight.perm is not None
    assert not torch.equal(weight.perm, torch.arange(weight.K, dtype=torch.int32))


def test_zero_points_of_15_follow_the_rule_that_the_caller_names() -> None:
    folder = DATA / "gptq/gptqmodel-asym-g64-v1-zero0"
    decoded = {}
    for rule in ("word", "masked", "unmasked"):
        with pytest.warns(UserWarning, match=r"raw zero points of 15.*gptq_zeros_rule"):
            (weight,) = convert.read_layers(folder, gptq_zeros_rule=rule)
        decoded[rule] = weight.dequantize().t().half()
    (reference,) = load_file(folder / "reference.safetensors").values()
    assert torch.equal(decoded["word"], reference)
    assert not torch.equal(decoded["masked"], reference)
    assert not torch.equal(decoded["unmasked"], decoded["masked"])


def test_the_documentation_lists_the_known_formats() -> None:
    """To update the page: python -m scripts.checkpoint_tables --write."""
    assert page_section.section(checkpoint_tables.PAGE, "scripts.checkpoint_tables") == checkpoint_tables.tables()


def test_every_read_format_names_known_weight_formats() -> None:
    for fmt in FORMATS:
        if fmt.name == "native":
            continue  # this format can represent all layers
        words = " ".join(formats for _, formats in fmt.variants)
        named = set(re.findall(r"\b(?:u?int[48]\w*|float[48]_\w+|nvfp4|mxfp[48]|lut4)\b", words))
        assert named and named <= set(WEIGHT_FORMATS)
