"""Compares a model's config with the settings in a GGUF file.

`from_pretrained(gguf_file=...)` makes the config from the file, and the differences correct this config. An existing
model cannot be corrected, because its modules have copies of the settings. Loading a file into such a model raises an
error if a difference changes the model's results.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_marlin_metal.checkpoints.files.gguf import GgufTensor
from torch_marlin_metal.checkpoints.formats.gguf_keys import KEYS, ROPE_TENSORS, FileSettings, same, shown
from torch_marlin_metal.models.gguf_case import (
    Case,
    Difference,
    has_setting,
    head_size,
    held_value,
    is_latent,
    plain,
)
from torch_marlin_metal.models.gguf_layers import of_llama_cpp, of_tensors
from torch_marlin_metal.models.gguf_rope import RopeError, differs, includes, layer_types, states_rope, wanted
from torch_marlin_metal.models.gguf_special import PERIODS, SPECIAL
from torch_marlin_metal.models.linear_layers import ModelMismatchError
from torch_marlin_metal.patterns import NameFilter, selects

# (architecture, number of layers) of the Gemma models whose attention scale llama.cpp derives from hidden size / heads.
SCALED_BY_WIDTH = (("gemma2", 46), ("gemma3", 62))
# Architectures whose model class has no bias after the attention, or a separate setting for this bias.
WITHOUT_OUTPUT_BIAS = ("glm4", "glm4moe", "seed_oss", "chatglm")
TIED = "output.weight"


def differences(
    config: Any, file: FileSettings, *, complete: bool = False, model: nn.Module | None = None
) -> list[Difference]:
    """Returns the settings of a transformers config whose values differ from those in the file.

    Args:
        config: the config of the text model.
        file: the file's keys and tensors.
        complete: True to compare also sizes, biases and shared tables, which loading checks itself, and to use
            llama.cpp's defaults for missing keys.
        model: the model of the config, whose rotary frequencies are compared. None compares rotary settings instead.
    """
    head = int(file.number(_key_of_head(config)) or head_size(config))
    case = Case(config, file, complete, head)
    found = [difference for key in file.values for difference in _of_key(case, key)]
    found += _of_biases(case)
    said = list(of_llama_cpp(config, file, complete)) + (list(of_tensors(config, file)) if complete else [])
    found += [
        Difference({key: file.values.get(key, value)}, setting, held_value(config, setting), value)
        for key, setting, value in said
        if has_setting(config, setting) and not same(held_value(config, setting), value)
    ]
    if complete:
        found += _of_tensors(case)
        found += _of_llama_cpp(case)
    return found + list(_of_rope(case, model))


def _key_of_head(config: Any) -> str:
    if not is_latent(config):
        return "attention.key_length"
    return "attention.key_length_mla" if config.model_type == "mistral4" else "rope.dimension_count"


def _of_key(case: Case, name: str) -> Iterator[Difference]:
    key, value = KEYS.get(name), case.file.values[name]
    if key is None or key.harmless or (key.size and not case.complete):
        return
    if name in SPECIAL:
        yield from SPECIAL[name](case, name, value)
    elif not key.special:
        yield from plain(case, name, key, value)


def _of_tensors(case: Case) -> Iterator[Difference]:
    """Yields differences between the config and the names and shapes of the file's tensors."""
    file, config = case.file, case.config
    table = file.tensors.get("token_embd.weight")
    said: list[tuple[str, tuple[str, ...], Any]] = [
        (
            "blk.0.attn_q.bias",
            ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias"),
            file.has("attn_q.bias") or file.has("attn_qkv.bias"),
        ),
        ("blk.0.ffn_up.bias", ("mlp_bias",), file.has("ffn_up.bias")),
        ("blk.0.attn_output.bias", ("attention_out_bias",), file.has("attn_output.bias")),
        ("blk.0.attn_q_norm.weight", ("use_qk_norm",), file.has("attn_q_norm.weight")),
        (TIED, ("tie_word_embeddings",), TIED not in file.tensors),
    ]
    if table is not None:
        said.append(("token_embd.weight", ("vocab_size",), table.shape[0]))
    if (table := file.tensors.get("per_layer_token_embd.weight")) is not None:
        said.append(("per_layer_token_embd.weight", ("vocab_size_per_layer_input",), table.shape[0]))
    if file.architecture == "gemma4":
        said.append(("blk.0.ffn_gate_inp.weight", ("enable_moe_block",), file.has("ffn_gate_inp.weight")))
        keys = {name.split(".")[1] for name in file.tensors if name.endswith(".attn_k.weight")}
        said.append(
            ("*.attn_v.weight", ("attention_k_eq_v",), any(f"blk.{n}.attn_v.weight" not in file.tensors for n in keys))
        )
    if (length := file.number("context_length")) is not None:
        said.append((file.full("context_length"), ("max_position_embeddings",), length))
    if file.architecture == "stablelm":
        said.append(("blk.0.ffn_norm.weight", ("use_parallel_residual",), not file.has("ffn_norm.weight")))
    for key, settings, value in said:
        setting = next((setting for setting in settings if has_setting(config, setting)), "")
        if setting and getattr(config, setting) != value:
            yield Difference({key: value}, setting, getattr(config, setting), value)


def _of_biases(case: Case) -> Iterator[Difference]:
    """Yields a difference if the config has one setting for four biases, but the file has only those of q, k and v."""
    name = "blk.0.attn_output.bias"
    if case.file.architecture in WITHOUT_OUTPUT_BIAS:
        return
    if has_setting(case.config, "attention_bias") and case.file.has("attn_q.bias") and name not in case.file.tensors:
        why = f"{type(case.config).__name__} has such a bias if it has those of q, k and v"
        why += "; a Qwen2ForCausalLM computes what a Llama without it computes" * (case.file.architecture == "llama")
        yield Difference({f"no {name}": None}, why=why)


def _of_llama_cpp(case: Case) -> Iterator[Difference]:
    """Yields differences between the config and llama.cpp's defaults, which apply if the file lacks a key.

    llama.cpp derives the attention scale of Gemma from the number of layers, and normalizes the expert weights of Qwen
    3.
    """
    config, architecture = case.config, case.file.architecture
    if (
        architecture in PERIODS
        and has_setting(config, "query_pre_attn_scalar")
        and not case.file.number("attention.scale")
    ):
        wide = (architecture, config.num_hidden_layers) in SCALED_BY_WIDTH
        value = config.hidden_size // config.num_attention_heads if wide else case.head
        yield from case.difference("attention.scale", "query_pre_attn_scalar", value)
    if architecture == "exaone4" and not case.file.number("attention.sliding_window"):
        types = ["full_attention"] * config.num_hidden_layers
        for setting, value in (("sliding_window", None), ("layer_types", types)):
            yield from case.difference("attention.sliding_window", setting, value)
    heads, width = case.file.number("attention.head_count"), case.file.number("embedding_length")
    stated = "attention.key_length" in case.file.values or is_latent(config) or not has_setting(config, "head_dim")
    if heads and width and not stated and config.head_dim not in (None, width // heads):
        yield from case.difference("attention.key_length", "head_dim", int(width // heads))
    if architecture in ("qwen3moe", "qwen3vlmoe") and "expert_weights_norm" not in case.file.values:
        yield from case.difference("expert_weights_norm", "norm_topk_prob", True)


def _head_of(case: Case, layer_type: str | None) -> int:
    sliding = layer_type == "sliding_attention" and has_setting(case.config, "global_head_dim")
    if not sliding:
        return case.head
    return int(case.file.number("attention.key_length_swa") or held_value(case.config, "head_dim"))


def _of_rope(case: Case, model: nn.Module | None) -> Iterator[Difference]:
    config, file = case.config, case.file
    if not has_setting(config, "rope_parameters") or not (case.complete or states_rope(file)):
        return
    said = {file.full(key): value for key, value in file.values.items() if key.startswith("rope.")}
    said |= {name: None for name in ROPE_TENSORS if name in file.tensors}
    types = layer_types(config)
    try:
        ropes = {kind: wanted(config, file, kind, _head_of(case, kind), case.complete) for kind in types}
    except RopeError as error:
        yield Difference(said, why=str(error))
        return
    if types == [None] and not same(file.number("rope.freq_base_swa") or ropes[None].base, ropes[None].base):
        yield case.nowhere("rope.freq_base_swa")
    held = config.rope_parameters
    if model is None:
        right = all(includes(held if kind is None else held[kind], rope.settings) for kind, rope in ropes.items())
    else:
        right = not any(differs(model, config, rope, kind) for kind, rope in ropes.items())
    if not right:
        settings = ropes[None].settings if types == [None] else {kind: rope.settings for kind, rope in ropes.items()}
        yield Difference(said, "rope_parameters", held, settings)
        length = settings.get("original_max_position_embeddings")
        if length and length != getattr(config, "original_max_position_embeddings", length):
            yield from case.difference(
                "rope.scaling.original_context_length", "original_max_position_embeddings", length
            )


def corrected(config: Any, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Returns the file's values for the settings in which a transformers config differs.

    Settings that do not exist in the config's class are omitted. `check_settings` raises an error for such a file.
    """
    found = differences(config, FileSettings(metadata, tensors), complete=True)
    return {difference.setting: difference.wanted for difference in found if difference.setting}


def check_settings(
    op: str,
    path: Any,
    model: nn.Module,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    ignore: NameFilter = (),
) -> list[str]:
    """Raises an error if the settings of a file and of a transformers model differ. Ignores other models.

    Args:
        op: the caller's name for the message.
        path: the file's path for the message.
        model: any model. Only a transformers model is compared.
        metadata: key -> value in the file.
        tensors: name in the file -> tensor. Some settings follow from their names and shapes.
        ignore: keys of the file that the model may contradict, selected as in `patterns.py`.

    Returns:
        The keys of the architecture whose meaning is unknown.

    Raises:
        ModelMismatchError: the settings differ. The message names each key, the file's value and the model's value.
    """
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return []
    file = FileSettings(metadata, tensors)
    config = model.config.get_text_config(decoder=True)
    with torch.device("cpu"):  # transformers may build the model under the meta device
        compared = differences(config, file, model=model)
    found = [each for each in compared if not each.chosen(ignore)]
    if found:
        fixes = [f"config.{each.setting} = {shown(each.wanted)}" for each in found if each.setting]
        how = f"Build the model with {', '.join(fixes)}" if fixes else "Build a model of the class that was converted"
        keys, taker = [next(iter(each.said)) for each in found], "MarlinConfig" if op == "from_pretrained" else op
        raise ModelMismatchError(
            f"{op}: {path}: the settings of the file and of the model differ, and so would their results: "
            f"{'; '.join(map(str, found))}. {how} (AutoConfig.from_pretrained(directory, gguf_file=...) returns the "
            f"file's settings), or keep the model's settings with {taker}(ignore={keys})"
        )
    return [key for key in file.unknown() if not selects(ignore, key)]


def unknown_keys(path: Any, keys: list[str]) -> str:
    """Returns a warning about the keys that `check_settings` returned."""
    return f"{path}: the meaning of {', '.join(keys)} is not known, so the model may compute something else"
