"""from_pretrained and load_quantized apply or refuse a GGUF file's settings that differ from the class's defaults."""

import ast
import re
import warnings
from array import array

import gguf
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from transformers import AutoConfig, AutoModelForCausalLM, T5Config
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from tests.support.gguf_metadata import of_biases, of_gemma3, shape
from tests.support.gguf_models import auto_class, model_of, write
from tests.support.gguf_settings import CASES, IDS, NEUTRAL, distance, kinds, reference
from torch_marlin_metal import load_quantized
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.formats.gguf_keys import KEYS, FileSettings
from torch_marlin_metal.checkpoints.formats.gguf_names import ARCHITECTURES
from torch_marlin_metal.integrations import transformers as integration
from torch_marlin_metal.integrations.transformers import packed_checkpoint
from torch_marlin_metal.integrations.transformers.gguf import MODEL_TYPES
from torch_marlin_metal.models.gguf_case import has_setting
from torch_marlin_metal.models.gguf_layers import of_tensors
from torch_marlin_metal.models.gguf_settings import differences
from torch_marlin_metal.models.gguf_special import SPECIAL
from torch_marlin_metal.models.linear_layers import ModelMismatchError

# Warnings about tables and projections that no weight format can represent in some models.
EXPECTED = r".*(has a forward of its own|computes with its weight|become floats: Q4_0 of attn_k_b)"


def test_a_t5_file_that_lacks_tensors_says_nothing_of_their_sizes() -> None:
    file = FileSettings({"general.architecture": "t5encoder"}, {})
    assert {setting for _, setting, _ in of_tensors(T5Config(), file)} == {"feed_forward_proj"}


@pytest.mark.parametrize("case", CASES)
def test_both_entry_points_take_what_the_file_says(case, tmp_path) -> None:
    """`from_pretrained` makes the config from the file; `load_quantized` gets a model with the same settings."""
    _, family, settings, _ = CASES[case]
    _, logits = reference(case, tmp_path / "m.gguf")
    assert "gguf" in integration.taken_over()
    made = auto_class(family).from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32, device_map="cpu")
    assert distance(made, logits) < 1e-4
    model = model_of(family, **settings | NEUTRAL.get(case, {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", EXPECTED)
        load_quantized(model, tmp_path / "m.gguf", progress=False)
    assert distance(model, logits) < 1e-4


@pytest.mark.parametrize(
    ("case", "kind"),
    [("llama3", "llama3"), ("llama3 of other numbers", "llama3"), ("llama3 of two pairs", "longrope")],
)
def test_the_factors_of_a_file_become_settings_that_other_programs_know(case, kind, tmp_path) -> None:
    reference(case, tmp_path / "m.gguf")
    found = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").rope_parameters
    assert found["rope_type"] == kind
    if case == "llama3":
        assert found == CASES[case][2]["rope_parameters"]


def test_within_restored_the_config_is_transformers_own(tmp_path) -> None:
    reference("linear", tmp_path / "m.gguf")
    with integration.restored():
        assert AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").rope_parameters["rope_type"] == "default"
    assert AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").rope_parameters["rope_type"] == "linear"


# The error for a model with the class's defaults: the key, the file's value and the model's value.
REFUSED = {
    "llama3": "llama.rope.freq_base = 20000, rope_freqs.weight, but config.rope_parameters is {",
    "linear": "llama.rope.scaling.type = 'linear', llama.rope.scaling.factor = 4, but config.rope_parameters is {",
    "linear of 2023": "llama.rope.scale_linear = 4, but config.rope_parameters is {",
    "yarn": "qwen2.rope.scaling.type = 'yarn', qwen2.rope.scaling.factor = 4",
    "yarn with all": "qwen3.rope.scaling.yarn_beta_fast = 16",
    "yarn of OLMo": "olmo2.rope.scaling.attn_factor = 1.4, but config.rope_parameters is {",
    "longrope": "rope_factors_long.weight, rope_factors_short.weight, but config.rope_parameters is {",
    "partial": "stablelm.rope.dimension_count = 16, stablelm.rope.freq_base = 20000, but config.rope_parameters is {",
    "base": "starcoder2.rope.freq_base = 900000, but config.rope_parameters is {",
    "eps": "nemotron.attention.layer_norm_epsilon = 0.001, but config.norm_eps is 1e-05",
    "caps": "gemma2.attn_logit_softcapping = 0.5, but config.attn_logit_softcapping is 50",
    "two ropes": "gemma3.rope.scaling.factor = 8, but config.rope_parameters is {'sliding_attention': {",
    "experts": "qwen3moe.expert_used_count = 3, but config.num_experts_per_tok is 2; "
    "qwen3moe.expert_weights_norm = True, but config.norm_topk_prob is False",
    "gpt-oss": "gpt-oss.attention.sliding_window = 8, but config.sliding_window is 128",
    "multipliers": "granite.attention.scale = 0.3, but config.attention_multiplier is 1; "
    "granite.residual_scale = 0.5, but config.residual_multiplier is 1; "
    "granite.embedding_scale = 3, but config.embedding_multiplier is 1; "
    "granite.logit_scale = 4, but config.logits_scaling is 1. Build the model with config.attention_multiplier = 0.3",
    "logits": "command-r.logit_scale = 0.3, but config.logit_scale is 0.0625",
    "clip": "olmoe.attention.clamp_kqv = 0.1, but config.clip_qkv is None",
    "linear attention": "qwen35.attention.layer_norm_rms_epsilon = 0.001, but config.rms_norm_eps is 1e-06; "
    "qwen35.rope.dimension_count = 16",
    "Gemma 4": "gemma4.final_logit_softcapping = 0.3, but config.final_logit_softcapping is None; "
    "gemma4.rope.dimension_count = 64, gemma4.rope.dimension_count_swa = 32, gemma4.rope.freq_base = 500000",
    "Gemma 4, experts": "gemma4.expert_used_count = 3, but config.top_k_experts is 2",
    "mixtral": "llama.rope.freq_base = 20000, but config.rope_parameters is {'rope_theta': 1000000",
}
SHAPES = ("num_hidden_layers", "intermediate_size", "moe_intermediate_size", "tie_word_embeddings")


@pytest.mark.parametrize("case", REFUSED)
def test_both_entry_points_refuse_a_model_of_other_settings(case, tmp_path) -> None:
    _, family, settings, _ = CASES[case]
    reference(case, tmp_path / "m.gguf")
    model = model_of(family, **{name: value for name, value in settings.items() if name in SHAPES})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelMismatchError, match=re.escape(REFUSED[case])) as raised:
        load_quantized(model, tmp_path / "m.gguf", progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ModelMismatchError, match=re.escape(REFUSED[case])):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", config=model.config, device_map="cpu")
    ignore = ast.literal_eval(re.search(r"ignore=(\[.*\])", str(raised.value))[1])
    own = integration.MarlinConfig(ignore=ignore)
    AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=model.config, quantization_config=own, device_map="cpu"
    )
    load_quantized(model, tmp_path / "m.gguf", ignore=ignore, progress=False)


@pytest.mark.parametrize(
    ("case", "parameter", "value"),
    [
        ("yarn with all", "attention_factor", 1.2),
        ("yarn with all", "beta_slow", 0.5),
        ("longrope", "long_factor", [2.0] * 16),
        ("longrope", "short_factor", [2.0] * 16),
        ("llama3", "high_freq_factor", 5.0),
    ],
)
def test_one_number_of_the_rotary_embedding_is_enough_to_refuse_a_model(case, parameter, value, tmp_path) -> None:
    _, family, settings, _ = CASES[case]
    reference(case, tmp_path / "m.gguf")
    other = settings | {"rope_parameters": settings["rope_parameters"] | {parameter: value}}
    with pytest.raises(ModelMismatchError, match=r"but config\.rope_parameters is"):
        load_quantized(model_of(family, **other), tmp_path / "m.gguf", progress=False)


@pytest.mark.parametrize(
    ("architecture", "family", "key", "value", "said"),
    [
        ("gemma4", "gemma4_text", "feed_forward_length", [0, 64, 64], "positive widths are expected"),
        ("qwen35", "qwen3_5_text", "full_attention_interval", 0, None),
    ],
)
def test_a_zero_is_no_divisor(architecture, family, key, value, said) -> None:
    settings = AutoConfig.for_model(family)
    stored = memoryview(array("i", value)) if isinstance(value, list) else value
    metadata = {"general.architecture": architecture, f"{architecture}.{key}": stored}
    why = {each.why for each in differences(settings, FileSettings(metadata, {}), complete=True)}
    assert (said is None and not any(why)) or said in why


def tiny(path, architecture: str, states, **settings):
    """Writes a model of two layers with the class's defaults and the keys that `states` adds, and returns the model."""
    model = model_of({"qwen3moe": "qwen3_moe"}.get(architecture, architecture), **settings)
    write(path, architecture, model, kinds, states)
    return model


def test_layers_of_another_kind_are_refused(tmp_path) -> None:
    """The head counts in an LFM 2 file define which layers are convolutions."""
    reference("lfm2", tmp_path / "m.gguf")
    _, family, settings, _ = CASES["lfm2"]
    model = model_of(family, **settings | {"layer_types": ["full_attention", "conv"]})
    said = re.escape("lfm2.attention.head_count_kv = [0, 1], but config.layer_types is ['full_attention', 'conv']")
    with pytest.raises(ModelMismatchError, match=said):
        load_quantized(model, tmp_path / "m.gguf", progress=False)


NOWHERE = {
    "attn_logit_softcapping": ("llama", lambda writer: writer.add_attn_logit_softcapping(30.0), "30"),
    "embedding_scale": ("qwen2", lambda writer: writer.add_embedding_scale(12.0), "12"),
    "expert_weights_scale": ("qwen3moe", lambda writer: writer.add_expert_weights_scale(2.5), "2.5"),
    "expert_gating_func": ("qwen3moe", lambda writer: writer.add_uint32("qwen3moe.expert_gating_func", 2), "2"),
    "expert_count": ("llama", lambda writer: writer.add_expert_count(8), "8"),
    "attention.sliding_window": ("llama", lambda writer: writer.add_sliding_window(512), "512"),
    "attention.value_length": ("qwen3", lambda writer: writer.add_value_length(64), "64"),
    "attention.scale": ("llama", lambda writer: writer.add_attention_scale(0.5), "0.5"),
    "attention.causal": ("llama", lambda writer: writer.add_causal_attention(False), "False"),
    "attention.max_alibi_bias": ("llama", lambda writer: writer.add_max_alibi_bias(8.0), "8"),
    "attention.head_count_kv": (
        "qwen2",
        lambda writer: writer.add_array("qwen2.attention.head_count_kv", [1, 2]),
        "[1, 2]",
    ),
    "use_parallel_residual": ("llama", lambda writer: writer.add_parallel_residual(True), "True"),
    "tensor_data_layout": ("qwen2", lambda writer: writer.add_tensor_data_layout("Meta AI original pth"), "'Meta AI"),
    "rope.dimension_sections": ("qwen2", lambda writer: writer.add_rope_dimension_sections([4, 6, 6, 0]), "[4, 6, 6"),
    "rope.freq_base_swa": ("llama", lambda writer: writer.add_rope_freq_base_swa(5000.0), "5000"),
    "ssm.state_size": ("llama", lambda writer: writer.add_ssm_state_size(16), "16"),
    "rope.scaling.type": ("llama", lambda writer: writer.add_string("llama.rope.scaling.type", "ntk"), "'ntk'"),
}


@pytest.mark.parametrize("key", NOWHERE)
def test_a_key_that_the_class_has_no_setting_for_is_refused(key, tmp_path) -> None:
    architecture, states, value = NOWHERE[key]

    def all_states(writer: GGUFWriter) -> None:
        if key == "attention.head_count_kv":
            del writer.kv_data[0][f"{architecture}.{key}"]
        states(writer)

    model = tiny(tmp_path / "m.gguf", architecture, all_states)
    said = re.escape(f"{architecture}.{key} = {value}")
    with pytest.raises(ModelMismatchError, match=f"{said}.*, but .*load_quantized\\(ignore="):
        load_quantized(model, tmp_path / "m.gguf", progress=False)
    if key != "expert_count":  # from_pretrained creates a Mixtral for this key
        with pytest.raises(ModelMismatchError, match=f"from_pretrained: .*{said}"):
            AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", device_map="cpu")
    load_quantized(model, tmp_path / "m.gguf", ignore=f"{architecture}.{key}", progress=False)


def test_three_biases_are_refused_for_llama_and_right_in_qwen2(tmp_path) -> None:
    model = model_of("llama", attention_bias=True)
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias = None
        for name in "qkv":
            torch.nn.init.normal_(layer.self_attn.get_submodule(f"{name}_proj").bias)
    write(tmp_path / "m.gguf", "llama", model, kinds, lambda writer: of_biases(writer, model.config))
    said = r"no blk\.0\.attn_output\.bias, but LlamaConfig has .* a Qwen2ForCausalLM computes"
    with pytest.raises(ModelMismatchError, match=said):
        load_quantized(model_of("llama", attention_bias=True), tmp_path / "m.gguf", progress=False)
    with pytest.raises(ModelMismatchError, match=said):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", device_map="cpu")
    loaded = model_of("qwen2")
    load_quantized(loaded, tmp_path / "m.gguf", progress=False)
    with torch.no_grad():
        assert distance(loaded, model.double()(IDS).logits) < 1e-4


BROKEN = {
    "llama.rope.freq_base": -1.0,
    "llama.rope.dimension_count": 64.0,  # a head has 32
    "llama.rope.scaling.factor": -4.0,
    "llama.rope.scaling.attn_factor": float("nan"),
    "llama.attention.key_length": "wide",
}


@pytest.mark.parametrize("key", BROKEN)
def test_a_value_without_sense_is_refused(key, tmp_path) -> None:
    add = "add_string" if isinstance(BROKEN[key], str) else "add_float32"
    model = tiny(tmp_path / "m.gguf", "llama", lambda writer: getattr(writer, add)(key, BROKEN[key]))
    with pytest.raises((ModelMismatchError, CheckpointError), match=re.escape(key)):
        load_quantized(model, tmp_path / "m.gguf", progress=False)


def test_values_with_the_meaning_of_an_absent_key_are_not_refused(tmp_path) -> None:
    def states(writer: GGUFWriter) -> None:
        writer.add_attn_logit_softcapping(0.0)
        writer.add_embedding_scale(1.0)
        writer.add_sliding_window(0)
        writer.add_expert_count(0)
        writer.add_clamp_kqv(0.0)
        writer.add_causal_attention(True)
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_rope_scaling_factor(8.0)  # ignored with this type
        writer.add_attention_scale(32**-0.5)
        writer.add_array("llama.attention.head_count", [2, 2])
        writer.add_tensor_data_layout("Meta AI original pth")

    def all_states(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["llama.attention.head_count"]
        states(writer)

    load_quantized(tiny(tmp_path / "m.gguf", "llama", all_states), tmp_path / "m.gguf", progress=False)
    off = tiny(tmp_path / "g.gguf", "gemma2", lambda writer: writer.add_final_logit_softcapping(0.0))
    with pytest.raises(ModelMismatchError, match=r"final_logit_softcapping = 0, but .*\. Build .* = None \("):
        load_quantized(off, tmp_path / "g.gguf", progress=False)


def test_an_unknown_key_is_reported(tmp_path, monkeypatch) -> None:
    def states(writer: GGUFWriter) -> None:
        of_biases(writer, model_of("llama").config)
        writer.add_float32("llama.attention.wobble", 3.0)

    model = tiny(tmp_path / "m.gguf", "llama", states)
    with pytest.warns(UserWarning, match=r"m\.gguf: the meaning of llama\.attention\.wobble is not known"):
        load_quantized(model, tmp_path / "m.gguf", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_quantized(model_of("llama"), tmp_path / "m.gguf", ignore="llama.attention.wobble", progress=False)
    told: list[str] = []
    monkeypatch.setattr(packed_checkpoint.logger, "warning", told.append)
    AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", device_map="cpu")
    assert len(told) == 1 and "the meaning of llama.attention.wobble is not known" in told[0]


def test_a_model_of_another_library_is_not_compared(tmp_path) -> None:
    tiny(tmp_path / "m.gguf", "llama", lambda writer: writer.add_rope_freq_base(1.0))
    own = torch.nn.Module()
    own.model, own.lm_head = model_of("llama").model, model_of("llama").lm_head
    load_quantized(own, tmp_path / "m.gguf", progress=False)


@pytest.mark.parametrize(
    ("architecture", "layers", "scalar"), [("gemma2", 46, 16), ("gemma2", 26, 32), ("gemma3", 62, 16)]
)
def test_the_scale_of_gemmas_attention_follows_from_the_number_of_layers(architecture, layers, scalar, tmp_path):
    def states(writer: GGUFWriter) -> None:
        del writer.kv_data[0][f"{architecture}.attention.head_count"]
        writer.add_head_count(4)
        shape(writer, model.config)
        del writer.kv_data[0][f"{architecture}.block_count"]
        writer.add_block_count(layers)
        writer.add_key_length(32)

    model = model_of(architecture)
    write(tmp_path / "m.gguf", architecture, model, kinds, states)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert (config.query_pre_attn_scalar, config.num_hidden_layers) == (scalar, layers)
    assert len(config.layer_types) == layers


@pytest.mark.parametrize("pattern", [3, [True, False, False, True, True, False, True]])
def test_the_pattern_of_layers_with_a_window(pattern, tmp_path) -> None:
    def states(writer: GGUFWriter) -> None:
        of_gemma3(writer, model.config)
        writer.add_sliding_window_pattern(pattern)

    model = model_of("gemma3", num_hidden_layers=7)
    write(tmp_path / "m.gguf", "gemma3", model, kinds, states)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    expected = [layer % 3 != 2 for layer in range(7)] if pattern == 3 else pattern
    assert [kind == "sliding_attention" for kind in config.layer_types] == expected
    with pytest.raises(ModelMismatchError, match=r"gemma3\.attention\.sliding_window_pattern = .*layer_types is \["):
        load_quantized(model, tmp_path / "m.gguf", progress=False)


def keys_of_gguf() -> set[str]:
    """Returns the package gguf's keys that depend on the architecture."""
    groups = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    groups += [inner for group in groups for inner in vars(group).values() if isinstance(inner, type)]
    values = [value for group in groups for value in vars(group).values() if isinstance(value, str)]
    return {value.removeprefix("{arch}.") for value in values if value.startswith("{arch}.") and "{dense}" not in value}


def test_the_table_has_every_key_of_gguf_and_of_transformers() -> None:
    assert keys_of_gguf() - KEYS.keys() == set()
    assert KEYS.keys() - keys_of_gguf() == {"rope.scale_linear"}
    tables = [GGUF_CONFIG_MAPPING.get(kind.removesuffix("_text"), {}) for kind in MODEL_TYPES.values()]
    mapped = {key for table in tables for key in table}
    assert mapped - KEYS.keys() == {"sliding_window"}  # an error in gguf's table for gpt-oss
    assert set(ARCHITECTURES) - set(MODEL_TYPES) == {"llama4", "qwen35", "qwen35moe", "lfm2"}
    assert {architecture for architecture, *_ in CASES.values()} == set(ARCHITECTURES) - {"llama4"}


def test_every_setting_of_the_table_is_one_of_a_config() -> None:
    kinds = [*(known.model_type for known in ARCHITECTURES.values()), "mixtral"]
    configs = [AutoConfig.for_model(kind) for kind in kinds]
    for name, key in KEYS.items():
        for setting in key.settings:
            assert any(has_setting(config, setting) for config in configs), (name, setting)
    special = {name for name, key in KEYS.items() if key.special and not name.startswith("rope.")}
    assert special <= SPECIAL.keys() <= KEYS.keys()
