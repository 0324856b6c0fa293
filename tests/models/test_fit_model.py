"""quantize_model, from_pretrained and FloatReader choose the same formats, by a memory limit or a recipe's name."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.models import tree
from torch_marlin_metal import MarlinLinear, quantize_model
from torch_marlin_metal.convert import CheckpointError, FloatReader, write_checkpoint
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.models.report import module_bytes
from torch_marlin_metal.quantize.like import FORMATS

TEXT = torch.arange(48).reshape(2, 24) * 5 % 96


def llama(is_tied: bool = True, layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": layers, "vocab_size": 96}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=is_tied)
    )
    with torch.no_grad():  # makes some layers matter more than others
        for index, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.weight.mul_(4.0**index)
            layer.self_attn.v_proj.weight[0, :8] *= 20
    return model.eval()


def formats(model: torch.nn.Module) -> dict[str, tuple[str, int]]:
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, MarlinLinear))
    return {name: (layer.weight_format, layer.group_size) for name, layer in layers}


@pytest.mark.parametrize("text", [None, TEXT], ids=["weights", "text"])
def test_the_model_has_the_bytes_that_the_report_states(text) -> None:
    model = llama()
    floats, before = copy.deepcopy(model), tree(model)
    with pytest.raises(ValueError, match=r"quantize_model: memory: expected at least .*; got 100 kB"):
        quantize_model(model, memory="100 kB", progress=False)
    assert tree(model) == before
    report = quantize_model(model, "uint4b8", 64, memory="220 kB", calibration=text, progress=False)
    assert module_bytes(model) <= 220_000
    assert report.fit.total_bytes == module_bytes(model)
    assert report.fit.summary() in str(report) or report.fit.summary() in report.summary()
    chosen = formats(model)
    assert len({name for name, _ in chosen.values()}) > 1
    for block in range(3):
        inside = f"model.layers.{block}"
        assert len({chosen[f"{inside}.self_attn.{part}_proj"] for part in "qkv"}) == 1
        assert chosen[f"{inside}.mlp.gate_proj"] == chosen[f"{inside}.mlp.up_proj"]
    assert model.lm_head.b_packed is model.model.embed_tokens.b_packed
    for name, parameter in floats.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, model.get_parameter(name))


def test_it_is_better_than_one_format_at_the_same_bytes() -> None:
    """The error is the KL divergence from the float model on a text."""
    floats = llama()

    def divergence(model) -> float:
        with torch.no_grad():
            p, q = (one(TEXT).logits.double().log_softmax(-1) for one in (floats, model))
        return float((p.exp() * (p - q)).sum(-1).mean())

    uniform = llama()
    quantize_model(uniform, "uint4b8", 64, progress=False)
    found = {}
    for name, text in (("weights", None), ("text", TEXT)):
        model = llama()
        quantize_model(model, "uint4b8", 64, memory=module_bytes(uniform), calibration=text, progress=False)
        assert module_bytes(model) <= module_bytes(uniform)
        found[name] = divergence(model)
    assert found["text"] <= divergence(uniform) * (1 + 1e-3)
    assert found["text"] <= found["weights"] * (1 + 1e-3)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("given", [{"memory": "230 kB"}, {"like": "Q4_K_M"}], ids=["memory", "like"])
def test_every_entry_point_makes_the_same_choice(given, is_tied, tmp_path) -> None:
    model = llama(is_tied, 2)
    model.save_pretrained(tmp_path / "floats")
    quantize_model(model, "uint4b8", 64, progress=False, **given)
    expected = formats(model)
    config = MarlinConfig("uint4b8", 64, **given)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", quantization_config=config)
    reader = FloatReader(tmp_path / "floats", "uint4b8", 64, **given)
    write_checkpoint(reader, tmp_path / "written")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    if "like" in given:
        assert formats(loaded) == expected == formats(written)
        kinds = {name: FORMATS[kind] for name, kind in (("lm_head", "Q8_0"), ("model.layers.0.mlp.up_proj", "Q5_0"))}
        assert {name: expected[name] for name in kinds} == kinds
    else:  # the remaining bytes may differ by a buffer, and so may a group size
        for model in (loaded, written):
            assert {key: name for key, (name, _) in formats(model).items()} == {
                key: name for key, (name, _) in expected.items()
            }
        assert reader.fit.total_bytes == pytest.approx(module_bytes(written), rel=0.02)


def test_dropout_does_not_disturb_a_measured_choice() -> None:
    found = []
    for training in (False, True):
        model = llama(layers=1)
        model.config.attention_dropout = 0.5
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        model.train(training)
        report = quantize_model(model, "uint4b8", 64, memory="90 kB", calibration=TEXT, progress=False)
        assert all(module.training is training for module in model.model.norm.modules())
        found.append((report.fit.error, formats(model)))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_formats_of_two_levels_are_the_same_at_each_entry_point(name, tmp_path) -> None:
    model = llama(layers=1)
    model.save_pretrained(tmp_path)
    quantize_model(model, name, progress=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MarlinConfig(name))
    assert formats(loaded) == formats(model)
    for layer, other in zip(loaded.model.layers[0].mlp.children(), model.model.layers[0].mlp.children(), strict=True):
        if isinstance(layer, MarlinLinear):
            assert torch.equal(layer.super_scales, other.super_scales)


def test_a_recipe_needs_no_global_scale_of_the_format_that_it_replaces(tmp_path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 96}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2)).save_pretrained(
        tmp_path / "floats"
    )
    reader = FloatReader(tmp_path / "floats", "nvfp4", like="Q8_0")
    write_checkpoint(reader, tmp_path / "packed")
    assert set(reader.formats()) == {"uint8b128"}


def test_the_file_of_a_mixture_has_at_most_the_bytes(tmp_path) -> None:
    """The file has a description of the format for each expert's matrix."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 96}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=16, num_experts_per_tok=2)
    Qwen3MoeForCausalLM(config).half().save_pretrained(tmp_path / "floats")
    for memory in (160_000, 170_000, 180_000):
        reader = FloatReader(tmp_path / "floats", memory=memory)
        write_checkpoint(reader, tmp_path / str(memory))
        (file,) = (tmp_path / str(memory)).glob("*.safetensors")
        held = sum(tensor.nbytes for tensor in load_file(file).values())
        assert held == reader.fit.total_bytes <= memory


def test_a_file_takes_a_choice_that_was_made_before(tmp_path) -> None:
    model = llama(layers=1)
    model.save_pretrained(tmp_path)
    report = quantize_model(model, memory="110 kB", calibration=TEXT, progress=False)
    assert "None" not in report.fit.summary()
    reader = FloatReader(tmp_path, chosen=report.fit.chosen())
    packed = {name: (layer.weight_format, layer.group_size) for name, layer in zip(reader.names(), reader, strict=True)}
    expected = formats(model)
    assert len(set(packed.values())) > 1
    assert packed == {name: expected[name] for name in packed}
    for chosen, message in (({"lm": ("q4_k", 32)}, "the format of each layer, got none of '"), ({}, "neither memory")):
        with pytest.raises(ValueError, match=f"FloatReader: chosen: expected {message}"):
            FloatReader(tmp_path, chosen=chosen, memory=None if chosen else "1 MB")


def test_wrong_arguments_are_refused(tmp_path) -> None:
    for given, message in (
        ({"memory": "9 GB", "like": "Q8_0"}, "quantize_model: expected memory or like, got both"),
        ({"memory": "lots"}, r"quantize_model: memory: expected a number and one of B, .* got 'lots'"),
        ({"like": "Q3_K_M"}, r"quantize_model: like: expected one of .*, got 'Q3_K_M'"),
        ({"calibration": TEXT}, "quantize_model: calibration: expected memory with it"),
        ({"memory": "1 MB", "calibration": TEXT.float()}, r"int64 \[B, S\], got torch.float32 \[2, 24\]"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_model(llama(), progress=False, **given)
    llama().save_pretrained(tmp_path)
    with pytest.raises((ValueError, CheckpointError), match="FloatReader: memory: expected at least"):
        FloatReader(tmp_path, memory="1 kB")
