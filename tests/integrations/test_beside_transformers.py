"""Importing this package does not change what transformers loads, for every method that it reads on a CPU."""

import json
import logging
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, HqqConfig, LlamaConfig, LlamaForCausalLM

from tests.support.models import IDS, SIZES
from torch_marlin_metal import MarlinLinear, convert, load_quantized
from torch_marlin_metal.integrations.transformers import MarlinConfig, restored, take_over

LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def scheme(layout: str, bits: int = 8, kind: str = "int", status: str = "compressed", **group) -> dict:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": status,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights} | group},
    }


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs unsigned codes along the last dimension. The first code is in the low bits."""
    per_word = 32 // bits
    parts = codes.to(torch.int64).unflatten(-1, (-1, per_word)) << (bits * torch.arange(per_word))
    total = parts.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def scaled(weight: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / largest
    return weight / scale, scale


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scale = scaled(weight, LARGEST["fp8"])
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scale}


def e5m2(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Writes E5M2, which no weight format can represent."""
    return {"weight": weight.contiguous().to(torch.float8_e5m2), "weight_scale": torch.ones(len(weight), 1)}


def packed(weight: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    codes, scale = scaled(weight, LARGEST[f"int{bits}"])
    stored = words(codes.round() + (1 << (bits - 1)), bits)
    return {"weight_packed": stored, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def frozen(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": weight, "weight_scale": scaled(weight, 7)[1]}


def blocks(weight: torch.Tensor, size: int = 32) -> dict[str, torch.Tensor]:
    tiles = weight.unflatten(1, (-1, size)).unflatten(0, (-1, size))
    scale = tiles.abs().amax((1, 3)) / LARGEST["fp8"]
    codes = (tiles / scale[:, None, :, None]).reshape(weight.shape)
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def ternary(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().mean()
    codes = ((weight / scale).round().clamp(-1, 1) + 1).to(torch.uint8).unflatten(0, (4, -1))
    return {"weight": sum(codes[i] << (2 * i) for i in range(4)).to(torch.uint8), "weight_scale": scale.reshape(1)}


def gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Writes GPTQ of 8 bits in one group, version 1."""
    codes, scale = scaled(weight, LARGEST["int8"])
    zeros = torch.full((1, len(weight)), 127)
    return {
        "qweight": words(codes.round() + 128, 8).T.contiguous(),
        "qzeros": words(zeros, 8),
        "scales": scale.T.half().contiguous(),
        "g_idx": torch.zeros(weight.shape[1], dtype=torch.int32),
    }


BITNET = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
E5M2 = (e5m2, scheme("float-quantized", kind="float", input_activations=TOKENS))


def write(path, part, settings: dict, **sizes) -> LlamaForCausalLM:
    """Writes a tiny Llama and returns the float model. `part` converts the weight of each projection to tensors."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | sizes)).eval()
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        base = name.removesuffix(".weight")
        found = part(value) if "_proj" in name else {"weight": value}
        tensors |= {f"{base}.{key}": tensor.contiguous() for key, tensor in found.items()}
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))
    return model


def logits(path, **kwargs) -> tuple[torch.Tensor, LlamaForCausalLM]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kwargs)
    with torch.no_grad():
        return model(IDS).logits, model


@torch._dynamo.config.patch(disable=True)  # transformers would compile the decoding of BitNet
def test_what_this_package_does_not_read_is_loaded_by_transformers(tmp_path, monkeypatch) -> None:
    write(tmp_path, ternary, BITNET)
    lines: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("torch_marlin_metal.integrations.transformers.take_over"), "warning", lines.append
    )
    with restored():
        want, theirs = logits(tmp_path)
    got, model = logits(tmp_path)
    assert torch.equal(got, want)
    assert [type(module) for module in model.modules()] == [type(module) for module in theirs.modules()]
    assert lines == []
    assert type(getattr(model, "hf_quantizer", None)) is type(getattr(theirs, "hf_quantizer", None))


def test_a_config_of_this_package_asks_for_its_error(tmp_path) -> None:
    floats = write(tmp_path, *E5M2)
    with pytest.raises(convert.UnsupportedFormat, match="E5M2 weights, which have no weight format"):
        logits(tmp_path, quantization_config=MarlinConfig(on_unsupported="error"))
    take_over(on_unsupported="error")
    try:
        with pytest.raises(convert.UnsupportedFormat, match="E5M2 weights, which have no weight format"):
            logits(tmp_path)
    finally:
        take_over()
    _, model = logits(tmp_path)
    for decoded, whole in zip(model.model.layers, floats.model.layers, strict=True):
        assert type(decoded.mlp.up_proj) is torch.nn.Linear
        assert torch.equal(decoded.mlp.up_proj.weight, whole.mlp.up_proj.weight.to(torch.float8_e5m2).float())


def test_if_nobody_reads_it_the_error_has_both_reasons(tmp_path) -> None:
    settings = {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": False}
    write(tmp_path, gptq, settings | {"pack_dtype": "int8"})
    with pytest.raises(convert.UnsupportedFormat, match=r"(?s)pack_dtype 'int8'.*itself does not.*ImportError: .*GPTQ"):
        logits(tmp_path)


@pytest.mark.parametrize(
    ("part", "settings", "weight_format"),
    [
        (fp8, scheme("float-quantized", kind="float", input_activations=TOKENS), "float8_e4m3"),
        (lambda weight: packed(weight, 8), scheme("pack-quantized"), "uint8b128"),
        (lambda weight: packed(weight, 4), scheme("pack-quantized", bits=4), "uint4b8"),
    ],
)
def test_what_stays_packed_equals_what_transformers_decodes(part, settings, weight_format, tmp_path) -> None:
    """transformers rounds the activations of the first case to E4M3; this package does not."""
    floats = write(tmp_path, part, settings)
    with restored():
        want, _ = logits(tmp_path)
    got, model = logits(tmp_path)
    assert model.model.layers[0].mlp.up_proj.weight_format == weight_format
    if weight_format == "float8_e4m3":
        exact = floats(IDS).logits
        assert (got - exact).norm() < (want - exact).norm()
    else:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["dense", "pack-quantized"])
def test_weights_of_floats_beside_scales_are_loaded_as_floats(layout, tmp_path) -> None:
    """llm-compressor saves such files without compression. transformers alone loads random weights from them."""
    floats = write(tmp_path, frozen, scheme(layout, bits=4, status="frozen"))
    got, model = logits(tmp_path)
    assert torch.equal(got, floats(IDS).logits)
    assert not hasattr(model.config, "quantization_config")
    with pytest.raises(convert.CheckpointError, match="all its weights are floats"):
        load_quantized(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path, progress=False)


def test_a_layer_of_floats_beside_packed_ones_is_loaded_as_floats(tmp_path) -> None:
    def some(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return frozen(weight) if weight.shape[0] == SIZES["intermediate_size"] else packed(weight, 4)

    floats = write(tmp_path, some, scheme("pack-quantized", bits=4))
    _, model = logits(tmp_path)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp.down_proj, MarlinLinear)
    assert torch.equal(mlp.up_proj.weight, floats.model.layers[0].mlp.up_proj.weight)
    other = LlamaForCausalLM(LlamaConfig(**SIZES))
    load_quantized(other, tmp_path, progress=False)
    assert torch.equal(other.model.layers[0].mlp.up_proj.weight, mlp.up_proj.weight)


def test_a_config_for_floats_reaches_its_own_quantizer(tmp_path) -> None:
    """transformers 5.23 does not quantize to HQQ during a load; bitsandbytes, torchao and quanto are not installed."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    for context in (restored, nullcontext):
        with context(), pytest.raises(NotImplementedError, match="HQQ is not available yet"):
            logits(tmp_path, quantization_config=HqqConfig(nbits=8, group_size=64))
