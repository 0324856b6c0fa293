"""Comparisons of GGUF keys with a transformers config, for keys that need special code."""

from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import Any

from torch_marlin_metal.checkpoints.formats.gguf_keys import KEYS, Key, same
from torch_marlin_metal.checkpoints.formats.gguf_names import ARCHITECTURES
from torch_marlin_metal.models.gguf_case import (
    Case,
    Difference,
    has_setting,
    head_size,
    held_value,
    is_latent,
    plain,
)

# For files that do not state which layers have a sliding window: llama.cpp's number of layers in a period. Only the
# last layer of a period has no window.
PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4, "exaone4": 4, "afmoe": 4}

# How the router computes expert weights: 1 is softmax over all experts (the default), 2 sigmoid, 3 softmax over the
# chosen experts.
GATING = dict.fromkeys(("llama4", "glm4moe", "dots1", "minimax-m2", "lfm2moe", "afmoe", "exaone-moe", "glm-dsa"), 2)
GATING |= {"gpt-oss": 3}
PARALLEL_BLOCKS = ("phi2", "command-r", "cohere2")
ENCODERS = ("bert", "nomic_bert", "modernbert", "eurobert", "t5")  # model types whose tokens attend to later tokens
# Architectures for text and images. transformers loads their files as text models, in which all parts of a position are
# equal.
TEXT_OF_IMAGES = ("qwen2vl", "qwen3vl", "qwen3vlmoe")


def _head(case: Case, name: str, value: Any) -> Iterator[Difference]:
    if is_latent(case.config):
        yield from _latent_head(case, name, value)
    elif has_setting(case.config, "global_head_dim"):
        yield from case.difference(name, "head_dim" if name.endswith("_swa") else "global_head_dim", value)
    elif name == "attention.key_length":
        if value != (held := head_size(case.config)):
            yield Difference({case.file.full(name): value}, "head_dim", held, value)
    elif value != case.head:
        yield case.nowhere(name, f"transformers' {type(case.config).__name__} has one size of a head, {case.head}")


def _latent_head(case: Case, name: str, value: Any) -> Iterator[Difference]:
    """Yields differences in the head sizes of latent attention.

    If a file has a key that ends in _mla, that key is the model's head size. Files written in 2024 have no such key,
    and their plain key is the head size.
    """
    file = case.file
    if f"{name}_mla" in file.values:
        return  # with the _mla key, this key is a head size of llama.cpp's own algorithm
    if name.startswith("attention.key_length"):
        rotated = int(file.number("rope.dimension_count") or 0)
        yield from case.difference(name, "qk_rope_head_dim", rotated)
        yield from case.difference(name, "qk_nope_head_dim", int(file.number(name) or 0) - rotated)
    else:
        yield from case.difference(name, "v_head_dim", int(file.number(name) or 0))


def _blocks(case: Case, name: str, value: Any) -> Iterator[Difference]:
    if case.config.model_type == "nemotron_h":
        return  # see `gguf_layers`
    count = int(case.file.number(name) or 0) - int(case.file.number("nextn_predict_layers") or 0)
    yield from case.difference(name, "num_hidden_layers", count)


def _feed_forward(case: Case, name: str, value: Any) -> Iterator[Difference]:
    """Yields differences in the width, which is twice as large in some layers of Gemma 4."""
    if isinstance(getattr(case.config, "intermediate_size", None), list):
        count = int(case.file.number("block_count") or 0)
        yield from case.difference(name, "intermediate_size", value if isinstance(value, list) else [value] * count)
        return
    if isinstance(value, list) and case.config.model_type == "nemotron_h":
        value = max(value)
    if not value:
        return
    if not isinstance(value, list) or not has_setting(case.config, "use_double_wide_mlp"):
        yield from plain(case, name, Key(("intermediate_size",), size=True), value)
        return
    if min(value, default=0) < 1:
        yield case.nowhere(name, "positive widths are expected")
        return
    yield from case.difference(name, "intermediate_size", min(value))
    if {each // min(value) for each in value} - {1, 2} or any(each % min(value) for each in value):
        yield case.nowhere(name, "all widths, or twice that width in the last layers, are expected")
    else:
        yield from case.difference(name, "use_double_wide_mlp", True)


def _key_value_heads(case: Case, name: str, value: Any) -> Iterator[Difference]:
    if is_latent(case.config):  # llama.cpp has one key head for all; files of 2024 have one per query head
        heads = case.file.number("attention.head_count")
        if value not in (1, heads):
            yield case.nowhere(name, "1 or the number of attention heads is expected")
        yield from case.difference(name, "num_key_value_heads", heads)
        return
    if not has_setting(case.config, "num_key_value_heads"):
        own = held_value(case.config, "num_attention_heads") if has_setting(case.config, "num_attention_heads") else 0
        if has_setting(case.config, "num_kv_heads"):  # Falcon, whose old layout has one key head
            if case.config.new_decoder_architecture or value != 1:
                yield from case.difference(name, "num_kv_heads", value)
        elif getattr(case.config, "multi_query", False):
            own = 1
        if value not in (0, own) and not has_setting(case.config, "num_kv_heads"):
            yield case.nowhere(name, f"transformers' {type(case.config).__name__} has {own}")
        return
    if isinstance(value, list) and 0 in value:
        yield from case.difference(name, "num_key_value_heads", max(value))
        if set(value) - {0, max(value)}:
            yield case.nowhere(name, "one number for all layers of attention is expected")
        if not case.config.model_type.startswith("lfm2"):
            return  # see `gguf_layers`
        yield from case.difference(name, "layer_types", ["full_attention" if each else "conv" for each in value])
        return
    if not has_setting(case.config, "num_global_key_value_heads"):
        yield from plain(case, name, Key(("num_key_value_heads",)), value)
        return
    pattern = case.file.values.get("attention.sliding_window_pattern")
    counts = value if isinstance(value, list) else [value] * len(pattern or ())
    if not isinstance(pattern, list) or len(pattern) != len(counts):
        yield case.nowhere(name, "a number for each layer of attention.sliding_window_pattern is expected")
        return
    for setting, sliding in (("num_key_value_heads", True), ("num_global_key_value_heads", False)):
        found = {count for count, each in zip(counts, pattern, strict=True) if bool(each) == sliding}
        if len(found) > 1:
            yield case.nowhere(name, "one number for all layers of a type is expected")
        elif found:
            yield from case.difference(name, setting, found.pop())


def _interval(case: Case, name: str, value: Any) -> Iterator[Difference]:
    if not has_setting(case.config, "layer_types") or not value:
        if value:
            yield case.nowhere(name)
        return
    layers = range(1, case.config.num_hidden_layers + 1)
    types = ["linear_attention" if number % value else "full_attention" for number in layers]
    yield from case.difference(name, "layer_types", types)


def _inner_size(case: Case, name: str, value: Any) -> Iterator[Difference]:
    heads = case.file.number("ssm.time_step_rank")
    sizes = ("linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "head_dim")
    size = next((size for size in sizes if has_setting(case.config, size)), "")
    if has_setting(case.config, "mamba_d_ssm"):
        yield from case.difference(name, "mamba_d_ssm", value)
    if size and heads and case.config.model_type != "jamba":
        yield from case.difference(name, size, value // heads)
    expand = next((setting for setting in ("mamba_expand", "expand") if has_setting(case.config, setting)), "")
    if expand and case.config.model_type not in ("nemotron_h", "falcon_h1"):
        yield from case.difference(
            name, expand, value // (case.file.number("embedding_length") or case.config.hidden_size)
        )
    elif value and not size:
        yield case.nowhere(name)


def _sections(case: Case, name: str, value: Any) -> Iterator[Difference]:
    """Yields a difference in the parts of a head that time, height and width rotate. They are equal for text."""
    sections = [each for each in (value if isinstance(value, list) else [value]) if each]
    held = (getattr(case.config, "rope_parameters", None) or {}).get("mrope_section")
    if held is not None and list(held) != sections:
        yield Difference({case.file.full(name): value}, "rope_parameters['mrope_section']", held, sections)
    elif (
        case.file.architecture not in TEXT_OF_IMAGES
        and held is None
        and not getattr(case.config, "ignore_keys_at_rope_validation", None)
    ):
        yield case.nowhere(name)


def _attention_scale(case: Case, name: str, value: Any) -> Iterator[Difference]:
    if not value or isinstance(value, list):
        return
    if has_setting(case.config, "attention_multiplier"):
        yield from case.difference(name, "attention_multiplier", value)
    elif has_setting(case.config, "query_pre_attn_scalar"):
        if not same(case.config.query_pre_attn_scalar**-0.5, value):
            yield from case.difference(name, "query_pre_attn_scalar", round(value**-2, 4))
    elif not same(case.head**-0.5, value):
        yield case.nowhere(name)


def _layer_pattern(case: Case, name: str, value: Any) -> Iterator[Difference]:
    window = case.file.number("attention.sliding_window")
    if not window:
        return
    stated = case.file.values.get("attention.sliding_window_pattern", PERIODS.get(case.file.architecture))
    if stated is None:
        return
    layers = range(case.config.num_hidden_layers)
    if isinstance(stated, list):
        sliding = [bool(each) for each in stated]
    elif case.file.architecture == "modern-bert":  # the first layer of a period has no window
        sliding = [layer % stated != 0 for layer in layers]
    else:
        sliding = [stated == 0 or layer % stated < stated - 1 for layer in layers]
    types = ["sliding_attention" if each else "full_attention" for each in sliding]
    if not has_setting(case.config, "layer_types"):
        if not all(sliding):
            yield case.nowhere(name)
    elif case.config.layer_types != types:
        said = {case.file.full("attention.sliding_window_pattern"): stated}
        yield Difference(said, "layer_types", case.config.layer_types, types)


def _window(case: Case, name: str, value: Any) -> Iterator[Difference]:
    yield from plain(case, name, KEYS[name], value)
    if "attention.sliding_window_pattern" not in case.file.values:
        yield from _layer_pattern(case, name, value)


def _weights_norm(case: Case, name: str, value: Any) -> Iterator[Difference]:
    if has_setting(case.config, "norm_topk_prob"):
        yield from case.difference(name, "norm_topk_prob", bool(value))
    elif bool(value) == (case.file.architecture == "llama4") and case.file.values.get("expert_count"):
        yield case.nowhere(name)


def _gating(case: Case, name: str, value: Any) -> Iterator[Difference]:
    expected = GATING.get(case.file.architecture, 1)
    if case.file.architecture == "deepseek2":
        expected = 1 if case.config.model_type == "deepseek_v2" else 2
    if value not in (0, expected):
        yield case.nowhere(name, f"transformers' {type(case.config).__name__} computes {expected}")


def _parallel(case: Case, name: str, value: Any) -> Iterator[Difference]:
    # The converter of StableLM writes True if the config lacks the setting. Norm tensors tell the true value.
    if has_setting(case.config, "use_parallel_residual") and case.file.architecture == "gptneox":
        yield from case.difference(name, "use_parallel_residual", bool(value))
    elif case.file.architecture != "stablelm" and value != (case.file.architecture in PARALLEL_BLOCKS):
        yield case.nowhere(name)


def _causal(case: Case, name: str, value: Any) -> Iterator[Difference]:
    if bool(value) == (case.config.model_type in ENCODERS):
        yield case.nowhere(name)


def _alibi(case: Case, name: str, value: Any) -> Iterator[Difference]:
    """Yields a difference in MPT's ALiBi slope or in its limit for q, k and v. Both are in a sub-config."""
    if not has_setting(case.config, "attn_config"):
        yield from plain(case, name, Key(("clip_qkv",), (0,)) if name.endswith("kqv") else Key(neutral=(0,)), value)
        return
    held = case.config.attn_config
    wanted: dict[str, Any] = {"alibi": bool(case.file.values.get("attention.max_alibi_bias", held.alibi))}
    wanted["alibi_bias_max"] = int(case.file.values.get("attention.max_alibi_bias") or held.alibi_bias_max)
    wanted["clip_qkv"] = case.file.values.get("attention.clamp_kqv") or None
    own = {key: getattr(held, key) for key in wanted}
    if not same(own, wanted):
        yield Difference({case.file.full(name): value}, "attn_config", own, wanted)


def _temperature(case: Case, name: str, value: Any) -> Iterator[Difference]:
    if has_setting(case.config, "attn_scale"):
        yield from plain(case, name, Key(("attn_scale",), (0,)), value)
    elif "llama_4_scaling_beta" not in getattr(case.config, "ignore_keys_at_rope_validation", ()):
        yield from plain(case, name, Key(neutral=(0,)), value)
    elif not same(held := (case.config.rope_parameters or {}).get("llama_4_scaling_beta"), value) and not case.complete:
        said = {case.file.full(name): value}
        yield Difference(said, "rope_parameters['llama_4_scaling_beta']", held, value)


def _normalizes(case: Case, name: str, value: Any) -> Iterator[Difference]:
    if bool(value) != (case.config.model_type == "falcon_mamba"):
        yield case.nowhere(name)


def _sparsity(case: Case, name: str, value: Any) -> Iterator[Difference]:
    """Yields a difference in the fractions of activations that become 0.

    The file stores the quantiles of the normal distribution for these fractions.
    """
    shares = [round(NormalDist().cdf(each), 6) for each in (value if isinstance(value, list) else [value])]
    if len(shares) == 1:
        shares *= int(case.file.number("block_count") or 1)
    held = getattr(case.config, "activation_sparsity_pattern", None)
    if held is None:
        yield case.nowhere(name)
    elif len(held) != len(shares) or any(abs(a - b) > 1e-6 for a, b in zip(held, shares, strict=True)):
        yield Difference({case.file.full(name): value}, "activation_sparsity_pattern", held, shares)


def _dense(case: Case, name: str, value: Any) -> Iterator[Difference]:
    if case.complete and not has_setting(case.config, "mlp_layer_types"):  # see `gguf_layers`
        yield from plain(case, name, KEYS[name], value)


def _finetuned(case: Case, name: str, value: Any) -> Iterator[Difference]:
    """Yields a difference for Granite's hybrid models if only the key or only the config has rotary positions."""
    if has_setting(case.config, "position_embedding_type"):
        held = case.config.position_embedding_type
        if (held == "rope") != bool(value):
            yield Difference({case.file.full(name): value}, "position_embedding_type", held, "rope" if value else None)


def _layout(case: Case, name: str, value: Any) -> Iterator[Difference]:
    known, architecture = ARCHITECTURES.get(case.file.architecture), case.file.architecture
    reorders = known is not None and known.reorders
    right = {"reference": True, "Meta AI original pth": reorders, "jploski": architecture == "falcon"}
    if not right.get(value, False):
        yield case.nowhere(name, "this order of rows is not known")


SPECIAL: dict[str, Callable[[Case, str, Any], Iterator[Difference]]] = {
    "block_count": _blocks,
    "feed_forward_length": _feed_forward,
    "attention.head_count_kv": _key_value_heads,
    "full_attention_interval": _interval,
    "ssm.inner_size": _inner_size,
    "rope.dimension_sections": _sections,
    "leading_dense_block_count": _dense,
    "ssm.dt_b_c_rms": _normalizes,
    "activation_sparsity_scale": _sparsity,
    "attention.causal": _causal,
    "attention.max_alibi_bias": _alibi,
    "attention.clamp_kqv": _alibi,
    "attention.temperature_scale": _temperature,
    "attention.key_length_mla": _latent_head,
    "attention.value_length_mla": _latent_head,
    "rope.scaling.finetuned": _finetuned,
    "attention.key_length": _head,
    "attention.value_length": _head,
    "attention.key_length_swa": _head,
    "attention.value_length_swa": _head,
    "attention.scale": _attention_scale,
    "attention.sliding_window": _window,
    "attention.sliding_window_pattern": _layer_pattern,
    "expert_weights_norm": _weights_norm,
    "expert_gating_func": _gating,
    "use_parallel_residual": _parallel,
    "tensor_data_layout": _layout,
}
