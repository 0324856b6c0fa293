"""Compares a model's config with what a GGUF file says about the model.

`from_pretrained(gguf_file=...)` makes the config from the file, so there the differences correct the config. A model
that exists already cannot be corrected: what it computes with is also in its modules. Loading a file into it stops if
a difference changes what the model computes.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_marlin_metal.checkpoints.files.gguf import GgufTensor
from torch_marlin_metal.checkpoints.formats.gguf_keys import KEYS, ROPE_TENSORS, FileSettings, Key, same, shown
from torch_marlin_metal.checkpoints.formats.gguf_names import ARCHITECTURES
from torch_marlin_metal.models.empty_model import ModelMismatchError
from torch_marlin_metal.models.gguf_rope import VARY_BY_LAYER, RopeError, differs, layer_types, states_rope, wanted
from torch_marlin_metal.patterns import NameFilter, selects

# Layers in a period, of which only the last one sees more than its window; llama.cpp's, for files without a pattern.
PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
# Settings that layers with a sliding window and others have of their own, in configs with a `per_layer_config`.
PER_LAYER = {
    "head_dim": ("sliding_attention", "head_dim"),
    "global_head_dim": ("full_attention", "head_dim"),
    "num_key_value_heads": ("sliding_attention", "num_key_value_heads"),
    "num_global_key_value_heads": ("full_attention", "num_key_value_heads"),
}

# Layers of the models of Gemma whose attention llama.cpp scales by the square root of hidden size / heads.
SCALED_BY_WIDTH = (("gemma2", 46), ("gemma3", 62))
GATING = {"llama4": 2, "gpt-oss": 3}  # sigmoid; softmax over the chosen experts; 1, softmax over all, elsewhere
PARALLEL_BLOCKS = ("phi2", "command-r")
TIED = "output.weight"


@dataclass(frozen=True)
class Difference:
    """A setting that a file and a config give other values.

    Attributes:
        said: what the file says, by its keys and tensors; None stands for the numbers of a tensor.
        setting: the config's setting, or "" if the config has none.
        held: the config's value.
        wanted: the value that the file asks for.
        why: for a difference without a setting: what is wrong.
    """

    said: Mapping[str, Any]
    setting: str = ""
    held: Any = None
    wanted: Any = None
    why: str = ""

    def __str__(self) -> str:
        said = [key if value is None else f"{key} = {shown(value)}" for key, value in self.said.items()]
        return f"{', '.join(said)}, but {self.why or f'config.{self.setting} is {shown(self.held)}'}"

    def chosen(self, ignore: NameFilter) -> bool:
        """Returns whether `ignore` selects one of the keys."""
        return any(selects(ignore, key) for key in self.said)


@dataclass(frozen=True)
class _Case:
    """What `SPECIAL` functions get: the config, the file, whether llama.cpp's defaults count, and the head's size."""

    config: Any
    file: FileSettings
    complete: bool
    head: int

    def difference(self, key: str, setting: str, value: Any) -> Iterator[Difference]:
        held = held_value(self.config, setting)
        if not same(held, value):
            yield Difference({self.file.full(key): self.file.values.get(key, value)}, setting, held, value)

    def nowhere(self, key: str, why: str = "") -> Difference:
        why = why or f"{type(self.config).__name__} has no setting for it"
        return Difference({self.file.full(key): self.file.values[key]}, why=why)


def differences(
    config: Any, file: FileSettings, *, complete: bool = False, model: nn.Module | None = None
) -> list[Difference]:
    """Returns the settings that a file and a config of transformers give other values.

    Args:
        config: the config of the text model.
        file: the file's keys and tensors.
        complete: whether to compare also what loading finds out itself, which are sizes, biases and shared tables, and
            what the file leaves to llama.cpp's defaults.
        model: the model of the config; None compares the rotary settings themselves instead of what they compute.
    """
    head = int(file.number("attention.key_length") or head_size(config))
    case = _Case(config, file, complete, head)
    found = [difference for key in file.values for difference in _of_key(case, key)]
    found += _of_biases(case)
    if complete:
        found += _of_tensors(case)
        found += _of_llama_cpp(case)
    return found + list(_of_rope(case, model))


def has_setting(config: Any, name: str) -> bool:
    """Returns whether a config's class has a setting. A config also keeps values that its class does not know."""
    if config.model_type in VARY_BY_LAYER and name in PER_LAYER:
        return True
    declared = getattr(type(config), "__dataclass_fields__", None)
    return hasattr(config, name) if declared is None else name in declared or name in type(config).attribute_map


def held_value(config: Any, name: str) -> Any:
    """Returns the value of a setting that a config has."""
    if config.model_type not in VARY_BY_LAYER or name not in PER_LAYER:
        return getattr(config, name)
    kind, own = PER_LAYER[name]
    return getattr(config.per_layer_config[config.layer_types.index(kind) if kind in config.layer_types else 0], own)


def head_size(config: Any) -> int:
    """Returns the size of a head, of layers without a sliding window if sizes vary."""
    name = "global_head_dim" if has_setting(config, "global_head_dim") else "head_dim"
    own = held_value(config, name) if has_setting(config, name) else getattr(config, name, None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _of_key(case: _Case, name: str) -> Iterator[Difference]:
    key, value = KEYS.get(name), case.file.values[name]
    if key is None or key.harmless or (key.size and not case.complete):
        return
    if name in SPECIAL:
        yield from SPECIAL[name](case, name, value)
    elif not key.special:
        yield from _plain(case, name, key, value)


def _plain(case: _Case, name: str, key: Key, value: Any) -> Iterator[Difference]:
    setting = next((setting for setting in key.settings if has_setting(case.config, setting)), "")
    neutral = value in key.neutral
    if isinstance(value, list) or not isinstance(value, bool | int | float):
        yield case.nowhere(name, f"one number for all layers is expected for a {type(case.config).__name__}")
    elif not setting:
        if not neutral and not key.size:
            yield case.nowhere(name)
    elif not neutral:
        yield from case.difference(name, setting, value)
    elif held_value(case.config, setting) not in (*key.neutral, None):
        yield from case.difference(name, setting, key.off)


def _head(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    vary = has_setting(case.config, "global_head_dim")
    if vary:
        yield from case.difference(name, "head_dim" if name.endswith("_swa") else "global_head_dim", value)
    elif name == "attention.key_length":
        if value != (held := head_size(case.config)):
            yield Difference({case.file.full(name): value}, "head_dim", held, value)
    elif value != case.head:
        yield case.nowhere(name, f"transformers' {type(case.config).__name__} has one size of a head, {case.head}")


def _blocks(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    count = int(case.file.number(name) or 0) - int(case.file.number("nextn_predict_layers") or 0)
    yield from case.difference(name, "num_hidden_layers", count)


def _feed_forward(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    """Yields differences of the width, which is twice as large in some layers of Gemma 4."""
    if not isinstance(value, list) or not has_setting(case.config, "use_double_wide_mlp"):
        yield from _plain(case, name, Key(("intermediate_size",), size=True), value)
        return
    yield from case.difference(name, "intermediate_size", min(value))
    if {each // min(value) for each in value} - {1, 2} or any(each % min(value) for each in value):
        yield case.nowhere(name, "all widths, or twice that width in the last layers, are expected")
    else:
        yield from case.difference(name, "use_double_wide_mlp", True)


def _key_value_heads(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    if not has_setting(case.config, "num_global_key_value_heads"):
        yield from _plain(case, name, Key(("num_key_value_heads",)), value)
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


def _interval(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    if not has_setting(case.config, "layer_types"):
        if value:
            yield case.nowhere(name)
        return
    layers = range(1, case.config.num_hidden_layers + 1)
    types = ["linear_attention" if number % value else "full_attention" for number in layers]
    if case.config.layer_types != types:
        yield Difference({case.file.full(name): value}, "layer_types", case.config.layer_types, types)


def _inner_size(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    heads = case.file.number("ssm.time_step_rank")
    if has_setting(case.config, "linear_value_head_dim") and heads:
        yield from case.difference(name, "linear_value_head_dim", value / heads)
    elif value:
        yield case.nowhere(name)


def _sections(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    """Yields a difference of the parts of a head that time, height and width turn; all are equal for texts."""
    sections = [each for each in (value if isinstance(value, list) else [value]) if each]
    held = (getattr(case.config, "rope_parameters", None) or {}).get("mrope_section")
    if held is not None and list(held) != sections:
        yield Difference({case.file.full(name): value}, "rope_parameters['mrope_section']", held, sections)
    elif held is None and not getattr(case.config, "ignore_keys_at_rope_validation", None):
        yield case.nowhere(name)


def _attention_scale(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    if not value or isinstance(value, list):
        return
    if has_setting(case.config, "attention_multiplier"):
        yield from case.difference(name, "attention_multiplier", value)
    elif has_setting(case.config, "query_pre_attn_scalar"):
        if not same(case.config.query_pre_attn_scalar**-0.5, value):
            yield from case.difference(name, "query_pre_attn_scalar", round(value**-2, 4))
    elif not same(case.head**-0.5, value):
        yield case.nowhere(name)


def _layer_pattern(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    window = case.file.number("attention.sliding_window")
    if not window:
        return
    stated = case.file.values.get("attention.sliding_window_pattern", PERIODS.get(case.file.architecture))
    if stated is None:
        return
    layers = range(case.config.num_hidden_layers)
    if isinstance(stated, list):
        sliding = [bool(each) for each in stated]
    else:
        sliding = [stated == 0 or layer % stated < stated - 1 for layer in layers]
    types = ["sliding_attention" if each else "full_attention" for each in sliding]
    if not has_setting(case.config, "layer_types"):
        if not all(sliding):
            yield case.nowhere(name)
    elif case.config.layer_types != types:
        said = {case.file.full("attention.sliding_window_pattern"): stated}
        yield Difference(said, "layer_types", case.config.layer_types, types)


def _window(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    yield from _plain(case, name, KEYS[name], value)
    if "attention.sliding_window_pattern" not in case.file.values:
        yield from _layer_pattern(case, name, value)


def _weights_norm(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    if has_setting(case.config, "norm_topk_prob"):
        yield from case.difference(name, "norm_topk_prob", bool(value))
    elif bool(value) == (case.file.architecture == "llama4") and case.file.values.get("expert_count"):
        yield case.nowhere(name)


def _gating(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    expected = GATING.get(case.file.architecture, 1)
    if value not in (0, expected):
        yield case.nowhere(name, f"transformers' {type(case.config).__name__} computes {expected}")


def _parallel(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    # The converter of StableLM writes True for configs without the setting. The tensors of the norms say what is right.
    if case.file.architecture != "stablelm" and value != (case.file.architecture in PARALLEL_BLOCKS):
        yield case.nowhere(name)


def _layout(case: _Case, name: str, value: Any) -> Iterator[Difference]:
    known = ARCHITECTURES.get(case.file.architecture)
    if value != "reference" and not (value == "Meta AI original pth" and known is not None and known.reorders):
        yield case.nowhere(name, "this order of rows is not known")


SPECIAL: dict[str, Callable[[_Case, str, Any], Iterator[Difference]]] = {
    "block_count": _blocks,
    "feed_forward_length": _feed_forward,
    "attention.head_count_kv": _key_value_heads,
    "full_attention_interval": _interval,
    "ssm.inner_size": _inner_size,
    "rope.dimension_sections": _sections,
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


def _of_tensors(case: _Case) -> Iterator[Difference]:
    """Yields what the names and shapes of the tensors say."""
    file, config = case.file, case.config
    table = file.tensors.get("token_embd.weight")
    said: list[tuple[str, tuple[str, ...], Any]] = [
        ("blk.0.attn_q.bias", ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias"), file.has("attn_q.bias")),
        ("blk.0.ffn_up.bias", ("mlp_bias",), file.has("ffn_up.bias")),
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


def _of_biases(case: _Case) -> Iterator[Difference]:
    """Yields that q, k and v have biases and the output projection has none, if the config has one setting for all."""
    name = "blk.0.attn_output.bias"
    if has_setting(case.config, "attention_bias") and case.file.has("attn_q.bias") and name not in case.file.tensors:
        why = f"{type(case.config).__name__} has such a bias if it has those of q, k and v"
        why += "; a Qwen2ForCausalLM computes what a Llama without it computes" * (case.file.architecture == "llama")
        yield Difference({f"no {name}": None}, why=why)


def _of_llama_cpp(case: _Case) -> Iterator[Difference]:
    """Yields what llama.cpp computes for an architecture if no key says otherwise.

    It knows the scale of Gemma's attention from the number of layers, and normalizes the weights of Qwen 3's experts.
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
    if architecture == "qwen3moe" and "expert_weights_norm" not in case.file.values:
        yield from case.difference("expert_weights_norm", "norm_topk_prob", True)


def _head_of(case: _Case, layer_type: str | None) -> int:
    """Returns the size of a head in the layers of a type."""
    sliding = layer_type == "sliding_attention" and has_setting(case.config, "global_head_dim")
    if not sliding:
        return case.head
    return int(case.file.number("attention.key_length_swa") or held_value(case.config, "head_dim"))


def _of_rope(case: _Case, model: nn.Module | None) -> Iterator[Difference]:
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
        right = all(_includes(held if kind is None else held[kind], rope.settings) for kind, rope in ropes.items())
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


def _includes(held: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    return all(name in held and same(held[name], value) for name, value in settings.items())


def corrected(config: Any, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Returns the settings of a config of transformers that a file gives other values, with the file's values.

    Settings that no config of this class has are left out; `check_settings` refuses the file.
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
    """Refuses a file whose settings are not those of a model of transformers. Does not look at other models.

    Args:
        op: the caller's name, for the message.
        path: the file, for the message.
        model: the model to load into.
        metadata: the file's metadata.
        tensors: the file's tensors.
        ignore: keys of the file that the model may contradict, chosen as in `patterns.py`.

    Returns:
        The keys of the architecture whose meaning is not known.

    Raises:
        ModelMismatchError: names each key, the file's value and the model's.
    """
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return []
    file = FileSettings(metadata, tensors)
    config = model.config.get_text_config(decoder=True)
    with torch.device("cpu"):  # transformers builds models under the meta device
        compared = differences(config, file, model=model)
    found = [each for each in compared if not each.chosen(ignore)]
    if found:
        fixes = [f"config.{each.setting} = {shown(each.wanted)}" for each in found if each.setting]
        how = f"Build the model with {', '.join(fixes)}" if fixes else "Build a model of the class that was converted"
        keys, taker = [next(iter(each.said)) for each in found], "MarlinConfig" if op == "from_pretrained" else op
        raise ModelMismatchError(
            f"{op}: {path}: the file says other settings than the model has, and they change what it computes: "
            f"{'; '.join(map(str, found))}. {how} (AutoConfig.from_pretrained(directory, gguf_file=...) returns the "
            f"file's settings), or keep the model's settings with {taker}(ignore={keys})"
        )
    return [key for key in file.unknown() if not selects(ignore, key)]


def unknown_keys(path: Any, keys: list[str]) -> str:
    """Returns the sentence about keys that `check_settings` returned."""
    return f"{path}: the meaning of {', '.join(keys)} is not known, so the model may compute something else"
