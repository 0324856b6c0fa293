"""from_pretrained finds the quantization settings of a checkpoint in every place that producers use."""

import json
import logging
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoRoundConfig,
    AwqConfig,
    BitsAndBytesConfig,
    CLIPConfig,
    CLIPModel,
    CLIPTextModel,
    CompressedTensorsConfig,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    GPTQConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.support.llama import MODELS
from tests.support.models import SIZES
from torch_marlin_metal import MarlinLinear, convert, load_quantized, quantize_model
from torch_marlin_metal.checkpoints.settings import CONFIG_FILES, CONFIG_KEYS
from torch_marlin_metal.integrations.transformers import MarlinConfig, restored

MADE = {path.parent.name: path.parent for path in sorted(MODELS.glob("*/model.safetensors"))}
GPTQ = MADE["gptq-sym-g32-actorder"]
MIXED = {"text_config": {"quantization_config": {"bits": 4}}, "vision_config": {"quantization_config": {"bits": 8}}}


@pytest.fixture
def told(monkeypatch) -> list[str]:
    lines: list[str] = []
    logger = logging.getLogger("torch_marlin_metal.integrations.transformers.take_over")
    monkeypatch.setattr(logger, "warning", lines.append)
    return lines


def moved(folder, path, file: str, key: str = "") -> None:
    """Copies a checkpoint and moves its settings to another file, or to another place in config.json."""
    shutil.copytree(folder, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    settings = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    if file == "config.json":
        settings = config | {key: settings}
    (path / file).write_text(json.dumps(settings))


def check(path, folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, MarlinLinear)}
    exact = load_file(folder / "reference.safetensors")
    assert len(layers) == 14
    for name, layer in layers.items():
        assert torch.equal(layer.dequantize().half(), exact[f"{name}.weight"]), name


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("file", CONFIG_FILES)
def test_a_file_beside_the_config(file, name, tmp_path) -> None:
    moved(MADE[name], tmp_path, file)
    check(tmp_path, MADE[name])


@pytest.mark.parametrize("key", CONFIG_KEYS[:2])
def test_a_key_of_the_config(key, tmp_path) -> None:
    moved(GPTQ, tmp_path, "config.json", key)
    check(tmp_path, GPTQ)


@pytest.mark.parametrize(
    ("name", "file"), [("gptq-sym-g32-actorder", CONFIG_FILES[0]), ("awq-gemm-asym-g32", CONFIG_FILES[1])]
)
def test_old_settings_without_a_method(name, file, tmp_path) -> None:
    moved(MADE[name], tmp_path, file)
    old = {"bits": 4, "group_size": 32, "desc_act": True, "sym": True}
    if "awq" in name:
        old = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (tmp_path / file).write_text(json.dumps(old))
    check(tmp_path, MADE[name])


def test_a_config_that_the_script_made(tmp_path) -> None:
    moved(GPTQ, tmp_path, CONFIG_FILES[0])
    config = AutoConfig.from_pretrained(tmp_path)
    assert not hasattr(config, "quantization_config")
    model = LlamaForCausalLM.from_pretrained(tmp_path, config=config)
    assert sum(isinstance(layer, MarlinLinear) for layer in model.modules()) == 14
    model.save_pretrained(tmp_path / "own")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "own", config=config)
    assert sum(isinstance(layer, MarlinLinear) for layer in again.modules()) == 14


def test_the_class_of_a_sub_model(tmp_path) -> None:
    """CLIPTextModel gets only the text_config; the settings are at the top level."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 5}
    torch.manual_seed(0)
    floats = CLIPModel(CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 28, "patch_size": 14}))
    floats.save_pretrained(tmp_path / "floats")
    config = MarlinConfig("uint4", 32)
    whole = CLIPModel.from_pretrained(tmp_path / "floats", quantization_config=config)
    whole.save_pretrained(tmp_path / "packed")
    ids = torch.tensor([[3, 9, 5]])
    part = CLIPTextModel.from_pretrained(tmp_path / "packed")
    assert sum(isinstance(layer, MarlinLinear) for layer in part.modules()) == 7
    with torch.no_grad():
        want = whole.text_model(input_ids=ids).last_hidden_state
        assert torch.equal(part(input_ids=ids).last_hidden_state, want)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (CONFIG_FILES[0], '{"bits": 4, "group_size": 32}'),
        (CONFIG_FILES[1], '{"bits": '),
        (CONFIG_FILES[2], '{"something": "else"}'),
        (CONFIG_FILES[3], "[]"),
        (CONFIG_FILES[4], '{"lm_head": {"weights": "qint8"}}'),
    ],
)
def test_a_file_beside_floats_changes_nothing(file, content, tmp_path, told) -> None:
    torch.manual_seed(0)
    floats = LlamaForCausalLM(LlamaConfig(**SIZES))
    floats.save_pretrained(tmp_path)
    (tmp_path / file).write_text(content)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in floats.state_dict().items())
    assert len(told) == 1 and str(tmp_path) in told[0]


def test_sub_models_with_different_settings_are_not_read(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXED))
    with pytest.raises(convert.UnsupportedFormat, match="sub-models have different quantization settings"):
        convert.open_reader(tmp_path)
    MIXED["vision_config"] = MIXED["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(MIXED))
    with pytest.raises(convert.CheckpointError, match="no safetensors file"):
        convert.open_reader(tmp_path)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gptq-sym-g32-actorder", GPTQConfig(bits=4)),
        ("gptq-sym-g32-actorder", AutoRoundConfig()),
        ("awq-gemm-asym-g32", AwqConfig(bits=4)),
        ("awq-gemm-asym-g32", AutoRoundConfig()),
        ("auto-round-asym-g32", AutoRoundConfig()),
        ("bitsandbytes-nf4-doublequant", BitsAndBytesConfig(load_in_4bit=True)),
        ("bitsandbytes-nf4-doublequant", BitsAndBytesConfig(load_in_8bit=True)),
        ("compressed-tensors-int4-asym-g32", CompressedTensorsConfig()),
        ("compressed-tensors-nvfp4", CompressedTensorsConfig()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_config_of_the_same_method_is_accepted_with_a_warning(name, config) -> None:
    with pytest.warns(UserWarning, match=rf"{type(config).__name__} has no effect.*MarlinConfig\(\.\.\.\)"):
        model = AutoModelForCausalLM.from_pretrained(MADE[name], quantization_config=config)
    assert sum(isinstance(layer, MarlinLinear) for layer in model.modules()) == 14


def test_a_config_of_another_method_is_refused_as_without_the_import() -> None:
    config = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ValueError, match="quantized with GPTQConfig but you are passing a BitsAndBytesConfig"):
        AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=config)


def test_a_config_that_asks_for_floats_gets_them_from_transformers(told) -> None:
    path, config = MADE["compressed-tensors-int4-asym-g32"], CompressedTensorsConfig(dequantize=True)
    with restored():
        want = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
    got = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
    assert got.state_dict().keys() == want.state_dict().keys()
    assert all(torch.equal(value, want.state_dict()[name]) for name, value in got.state_dict().items())
    assert len(told) == 1 and "CompressedTensorsConfig.dequantize" in told[0]


def test_no_warning_without_a_config() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        AutoModelForCausalLM.from_pretrained(MADE["auto-round-asym-g32"])


def test_load_quantized_finds_the_same(tmp_path) -> None:
    moved(GPTQ, tmp_path, CONFIG_FILES[2])
    model = LlamaForCausalLM(AutoConfig.from_pretrained(tmp_path)).half()
    assert len(load_quantized(model, tmp_path, progress=False).converted) == 14


def test_the_dtype_is_that_of_the_weights_and_not_of_scales(tmp_path) -> None:
    """The part of the config that the class gets does not state a dtype."""
    text = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text | heads, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config).bfloat16()
    quantize_model(model, progress=False)
    model.save_pretrained(tmp_path)
    assert Gemma3ForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
