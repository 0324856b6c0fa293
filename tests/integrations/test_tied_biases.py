"""Heads whose bias is also a tensor of another module. A file stores the bias under one of the two names."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import FlavaConfig, FlavaForPreTraining, XLMRobertaConfig, XLMRobertaForMaskedLM

from tests.support.models import same
from torch_marlin_metal import MarlinLinear, load_quantized, quantize_model
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.convert import open_reader
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.load.caller import Caller
from torch_marlin_metal.load.quantized import load_all
from torch_marlin_metal.models.linear_layers import shared_weights
from torch_marlin_metal.parallel import MarlinColwiseParallel, SplitPlan

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = {"vocab_size": 64, "max_position_embeddings": 16}


def xlm_roberta() -> XLMRobertaForMaskedLM:
    return XLMRobertaForMaskedLM(XLMRobertaConfig(**SIZES, **WORDS))


def flava() -> FlavaForPreTraining:
    image = SIZES | {"image_size": 32, "patch_size": 16, "vocab_size": 64}
    parts = {"text_config": SIZES | WORDS, "image_config": image, "multimodal_config": SIZES}
    return FlavaForPreTraining(FlavaConfig(**parts, hidden_size=64, projection_dim=64, init_codebook=False))


# The head's bias, the tensor that shares its memory, and the one that a saved file contains.
XLM = xlm_roberta, "lm_head.decoder.bias", "lm_head.bias", "lm_head.bias"
FLAVA = flava, "mlm_head.decoder.bias", "mlm_head.bias", "mlm_head.decoder.bias"
HEADS = pytest.mark.parametrize(("make", "inner", "outer", "stored"), [XLM, FLAVA], ids=["xlm-roberta", "flava"])


@pytest.mark.parametrize("packed", [True, False])
@HEADS
def test_a_tied_bias_is_saved_once_and_loaded_as_one_tensor(make, inner, outer, stored, packed, tmp_path) -> None:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        model.get_parameter(outer).normal_()
    bias = model.get_parameter(outer).detach().clone()
    with torch.device("meta"):
        empty = make()
    floats = () if packed else ("*.decoder", "*.word_embeddings")
    quantize_model(model, "uint4", 32, exclude=floats, progress=False)
    model.save_pretrained(tmp_path)
    assert {inner, outer} & load_file(tmp_path / "model.safetensors").keys() == {stored}
    hosted, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    load_quantized(empty, tmp_path, progress=False)
    for loaded in (hosted, empty):
        assert isinstance(loaded.get_submodule(inner.removesuffix(".bias")), MarlinLinear) == packed
        assert loaded.get_parameter(inner) is loaded.get_parameter(outer)
        assert torch.equal(loaded.get_parameter(inner), bias)
        assert same(loaded.state_dict(), model.state_dict())
        loaded.tie_weights()
        assert same(loaded.state_dict(), model.state_dict())
    decoded = hosted.dequantize()
    assert decoded.get_parameter(inner) is decoded.get_parameter(outer)
    assert torch.equal(decoded.get_parameter(inner), bias)
    if packed:
        floats = MarlinConfig(modules_to_not_convert=inner.removesuffix(".bias"))
        loaded = type(model).from_pretrained(tmp_path, quantization_config=floats)
        assert loaded.get_submodule(inner.removesuffix(".bias")).weight.is_floating_point()
        assert loaded.get_parameter(inner) is loaded.get_parameter(outer)
        assert torch.equal(loaded.get_parameter(inner), bias)


def saved(make, path) -> None:
    model = make()
    quantize_model(model, "uint4", 32, progress=False)
    model.save_pretrained(path)


@HEADS
def test_a_layer_of_another_size_keeps_its_bias_tied(make, inner, outer, stored, tmp_path) -> None:
    saved(make, tmp_path)
    config = make().config
    getattr(config, "text_config", config).vocab_size = 72
    loaded = make.__annotations__["return"].from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=True)
    assert loaded.get_parameter(inner) is loaded.get_parameter(outer)
    assert loaded.get_parameter(inner).shape == (72,) and loaded.get_parameter(inner).isfinite().all()


@HEADS
def test_a_skipped_layer_keeps_its_bias_tied(make, inner, outer, stored, tmp_path, monkeypatch) -> None:
    saved(make, tmp_path)
    model, layer = make(), inner.removesuffix(".bias")
    read, names = CheckpointReader.read, open_reader(tmp_path).layer_names

    def skip(self, index):
        return None if names[index] == layer else read(self, index)

    monkeypatch.setattr(CheckpointReader, "read", skip)
    floats = model.get_submodule(layer)
    load_quantized(model, tmp_path, on_unsupported="skip", progress=False)
    assert model.get_submodule(layer) is floats
    assert model.get_parameter(inner) is model.get_parameter(outer)


@HEADS
def test_a_layer_with_a_tied_bias_is_not_split(make, inner, outer, stored, tmp_path) -> None:
    saved(make, tmp_path)
    plan = SplitPlan(SimpleNamespace(ndim=1), {inner.removesuffix(".bias"): MarlinColwiseParallel()})
    with pytest.raises(TypeError, match=r"decoder': expected .* or has a tied bias"):
        load_quantized(make(), tmp_path, split=plan, progress=False)


def test_a_bias_that_is_tied_in_the_model_and_by_the_caller_is_one_tensor(tmp_path) -> None:
    make, inner, outer, _ = FLAVA
    saved(make, tmp_path)
    model = make()
    caller = Caller(op="", find=str, ties=shared_weights(model), bias_ties={outer: inner}, progress=False)
    load_all(model, open_reader(tmp_path), caller)
    assert model.get_parameter(inner) is model.get_parameter(outer)
