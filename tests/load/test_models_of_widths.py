"""Complete models of several widths stay packed.

Layers that no format can represent become floats, with one warning.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.integrations.test_beside_transformers import blocks, e5m2, fp8, gptq, packed, scheme, words, write
from tests.support.models import IDS, SIZES
from torch_marlin_metal import MarlinLinear, convert, load_quantized
from torch_marlin_metal.integrations.transformers import MarlinConfig, restored
from torch_marlin_metal.load import plan
from torch_marlin_metal.load.loader import Loader

OTHER = "model.layers.0.mlp.down_proj"
MODELOPT = {"quant_method": "modelopt"}


def test_codes_outside_the_layers_are_not_taken_for_values(tmp_path) -> None:
    write(tmp_path, fp8, MODELOPT | {"quant_algo": "FP8"})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{OTHER}_weight_scale"] = tensors.pop(f"{OTHER}.weight_scale")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"{OTHER}.weight' holds codes \(F8_E4M3\) with the scales '{OTHER}_weight_scale'"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_codes_of_a_method_that_transformers_ignores_are_no_weights(tmp_path) -> None:
    write(tmp_path, fp8, MODELOPT | {"quant_algo": "FP8_OF_TOMORROW"})
    with pytest.raises(convert.UnsupportedFormat, match="FP8_OF_TOMORROW"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def four(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Writes GPTQ of 4 bit in one group, version 1."""
    scale = weight.abs().amax(1, keepdim=True) / 7
    return {
        "qweight": words((weight / scale).round() + 8, 4).T.contiguous(),
        "qzeros": words(torch.full((1, len(weight)), 7), 4),
        "scales": scale.T.half().contiguous(),
        "g_idx": torch.zeros(weight.shape[1], dtype=torch.int32),
    }


GPTQ = {"bits": 4, "group_size": -1, "sym": True, "desc_act": False}
# A function for 8-bit matrices, one for 4-bit matrices, the settings, and the weight format of the 8-bit matrices.
MIXTURES = {
    "GPTQ's dynamic": (
        gptq,
        four,
        GPTQ | {"quant_method": "gptq", "dynamic": {"+:.*down.*": {"bits": 8}}},
        "uint8b128",
    ),
    "AutoRound": (
        gptq,
        four,
        GPTQ
        | {"quant_method": "auto-round", "extra_config": {OTHER: {"bits": 8}}, "packing_format": "auto_round:gptq"},
        "uint8b128",
    ),
    "mixed-precision": (fp8, lambda weight: packed(weight, 4), scheme("mixed-precision", 4), "float8_e4m3"),
}


def mixture(path: Path, eight, other, settings) -> LlamaForCausalLM:
    """Writes a Llama with 8-bit down projections and other projections of 4 bits. Returns the float model."""
    return write(
        path, lambda weight: (eight if weight.shape[1] == SIZES["intermediate_size"] else other)(weight), settings
    )


def by_load_quantized(path: Path, **options) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    load_quantized(model, path, progress=False, **options)
    return model


def by_from_pretrained(path: Path, **options) -> LlamaForCausalLM:
    config = {"quantization_config": MarlinConfig(**options)} if options else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **config)


@pytest.mark.parametrize("load", [by_load_quantized, by_from_pretrained])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_widths_stays_packed(name, load, tmp_path) -> None:
    *parts, weight_format = MIXTURES[name]
    whole = mixture(tmp_path, *parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = load(tmp_path)
    assert {layer.mlp.down_proj.weight_format for layer in model.model.layers} == {weight_format}
    assert {layer.mlp.up_proj.weight_format for layer in model.model.layers} == {"uint4b8"}
    for layer, exact in zip(model.model.layers, whole.model.layers, strict=True):
        torch.testing.assert_close(layer.mlp.down_proj.dequantize(), exact.mlp.down_proj.weight, rtol=0.07, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=0.2, atol=0.2)


@pytest.mark.parametrize("load", [by_load_quantized, by_from_pretrained])
def test_a_mixture_with_floats_loads_with_one_warning(load, tmp_path, monkeypatch) -> None:
    whole = mixture(tmp_path, e5m2, lambda weight: packed(weight, 4), scheme("mixed-precision", 4))
    monkeypatch.setattr("torch_marlin_metal.integrations.transformers.packed_checkpoint.logger.warning", warnings.warn)
    with pytest.warns(UserWarning, match="have no weight format and become floats") as caught:
        model = load(tmp_path)
    (told,) = [str(entry.message) for entry in caught if "weight format" in str(entry.message)]
    down = [layer.mlp.down_proj for layer in model.model.layers]
    assert {type(layer) for layer in down} == {torch.nn.Linear}
    assert {type(layer.mlp.up_proj) for layer in model.model.layers} == {MarlinLinear}
    for layer, exact in zip(model.model.layers, whole.model.layers, strict=True):
        torch.testing.assert_close(
            layer.mlp.down_proj.weight, exact.mlp.down_proj.weight.to(torch.float8_e5m2).float(), rtol=0, atol=0
        )
    state = load_file(tmp_path / "model.safetensors")
    sizes = {name: tensor.nbytes for name, tensor in state.items() if "_proj" in name}
    eight = sum(size for layer, size in sizes.items() if "down" in layer)
    held = sum(layer.weight.nbytes for layer in down)
    share = f"{eight / sum(sizes.values()):.0%}"
    assert f": {share} of the bytes" in told and "E5M2 weights" in told and f"({share}). They take" in told
    assert f"{held / 1e6:.3g} MB instead of {eight / 1e6:.3g} MB" in told
    with pytest.raises(convert.UnsupportedFormat, match=f"layer '{re.escape(OTHER)}'"):
        load(tmp_path, on_unsupported="error")


@pytest.mark.parametrize("load", [by_load_quantized, by_from_pretrained])
def test_the_warning_comes_before_anything_is_loaded(load, tmp_path, monkeypatch) -> None:
    mixture(tmp_path, e5m2, lambda weight: packed(weight, 4), scheme("mixed-precision", 4))
    monkeypatch.setattr("torch_marlin_metal.integrations.transformers.packed_checkpoint.logger.warning", warnings.warn)
    monkeypatch.setattr(Loader, "place", lambda self: pytest.fail("place"))
    with pytest.warns(UserWarning, match="become floats: E5M2"), pytest.raises(pytest.fail.Exception, match="place"):
        load(tmp_path)


def test_a_part_that_is_tiny_needs_no_warning(tmp_path) -> None:
    """An example of a tiny part is a gate that its producer stored in another format."""
    write(tmp_path, lambda weight: packed(weight, 4), scheme("mixed-precision", 4))
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file(
        state | {"gate.weight": torch.zeros(2, 8).to(torch.float8_e5m2), "gate.weight_scale": torch.ones(2, 1)}, file
    )
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.gate = torch.nn.Linear(8, 2, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = load_quantized(model, tmp_path, progress=False)
    (left,) = [layer for layer in report.left if layer.name == "gate"]
    assert "E5M2 weights" in left.reason and not model.gate.weight.any()


EIGHT = {
    "float-quantized": (fp8, scheme("float-quantized", kind="float")),
    "fp8": (blocks, {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}),
}


@pytest.mark.parametrize("name", EIGHT)
def test_a_checkpoint_of_8_bit_computes_what_transformers_computes_of_its_floats(name, tmp_path) -> None:
    write(tmp_path, *EIGHT[name])
    with restored(), torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(IDS).logits
    for load in (by_load_quantized, by_from_pretrained):
        model = load(tmp_path)
        assert model.model.layers[0].mlp.up_proj.weight_format == "float8_e4m3"
        with torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("load", [by_load_quantized, by_from_pretrained])
def test_scales_of_caches_and_activations_are_left_out_with_one_line(load, tmp_path, monkeypatch) -> None:
    """ModelOpt, compressed-tensors and torchao store such scales. Caches and activations of this package are floats."""
    write(tmp_path, fp8, MODELOPT | {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
    file, told = tmp_path / "model.safetensors", []
    state = load_file(file)
    before = load(tmp_path)(IDS).logits
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        state |= {f"{attention}.{kind}_proj.{kind}_scale": torch.ones(()) for kind in "kv"}
    save_file(state, file, {"format": "pt"})
    log = "torch_marlin_metal.integrations.transformers.packed_checkpoint.logger.warning"
    monkeypatch.setattr(log, told.append)
    assert torch.equal(load(tmp_path)(IDS).logits, before)
    line = "*.k_scale, *.v_scale (4 tensors)"
    if load is by_from_pretrained:
        assert [line in text for text in told] == [True]
    else:
        report = load_quantized(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path, progress=False)
        assert [layer.reason for layer in report.left if layer.name == line] == [plan.SCALES]
