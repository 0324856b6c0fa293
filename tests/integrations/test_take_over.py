"""The integration takes over transformers' tables of quantizers, restores them, and names a transformers that is too old."""

import os

import pytest
from transformers import AutoModelForCausalLM, GPTQConfig
from transformers.quantizers import auto as tables
from transformers.quantizers import register_quantization_config, register_quantizer

import torch_marlin_metal.integrations.transformers as integration
from tests.support.llama import MODELS
from torch_marlin_metal.integrations.transformers import MarlinConfig, restore, restored, take_over, taken_over

os.environ["HF_HUB_OFFLINE"] = "1"
GPTQ = MODELS / "gptq-sym-g32-actorder"


def test_the_take_over_is_complete_and_comes_undone() -> None:
    ours = dict(tables.AUTO_QUANTIZATION_CONFIG_MAPPING)
    readable = {
        "gptq",
        "awq",
        "compressed-tensors",
        "bitsandbytes_4bit",
        "auto-round",
        "hqq",
        "torchao",
        "metal",
        "mxfp4",
    }
    assert readable <= set(taken_over())
    assert {ours[method] for method in taken_over() if method != "gguf"} == {MarlinConfig}
    restore()
    try:
        theirs = tables.AUTO_QUANTIZATION_CONFIG_MAPPING
        assert taken_over() == []
        assert theirs["gptq"] is GPTQConfig
        assert MarlinConfig not in tables.LOADING_ATTRIBUTES_CONFIG_TYPES
        assert {name for name, cls in theirs.items() if cls is MarlinConfig} == {"torch_marlin_metal"}
        assert theirs.keys() - {"torch_marlin_metal"} <= tables.AUTO_QUANTIZER_MAPPING.keys()
        assert tables.AUTO_QUANTIZER_MAPPING["gguf"].__module__.startswith("transformers.")
        with pytest.raises(ValueError, match="GPTQConfig but you are passing a MarlinConfig"):
            AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=MarlinConfig())
    finally:
        take_over()
    assert ours == tables.AUTO_QUANTIZATION_CONFIG_MAPPING
    with restored():
        assert taken_over() == []
    assert ours == tables.AUTO_QUANTIZATION_CONFIG_MAPPING


def test_transformers_own_rules_for_names_and_configs() -> None:
    with pytest.raises(ValueError, match="already registered"):
        register_quantizer("torch_marlin_metal")(integration.MarlinQuantizer)
    with pytest.raises(ValueError, match="already registered"):
        register_quantization_config("gptq")(MarlinConfig)
    with pytest.raises(ValueError, match="MarlinConfig but you are passing a GPTQConfig"):
        AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=GPTQConfig(bits=4))


@pytest.mark.parametrize("version", ["4.57.1", "5.22.0"])
def test_an_old_transformers_is_named(version, monkeypatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ImportError, match=rf"needs transformers >= 5.23 .*found {version}"):
        integration._require_transformers()


def test_a_missing_transformers_is_named(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5.23' accelerate.*not installed"):
        integration._require_transformers()
