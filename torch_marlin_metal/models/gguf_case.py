"""Compares settings of a transformers config with the values in a GGUF file, one at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch_marlin_metal.checkpoints.formats.gguf_keys import FileSettings, Key, same, shown
from torch_marlin_metal.models.gguf_rope import VARY_BY_LAYER
from torch_marlin_metal.patterns import NameFilter, selects

# Settings that vary by layer in configs with a `per_layer_config`: name -> (layer type, name in its config).
PER_LAYER = {
    "head_dim": ("sliding_attention", "head_dim"),
    "global_head_dim": ("full_attention", "head_dim"),
    "num_key_value_heads": ("sliding_attention", "num_key_value_heads"),
    "num_global_key_value_heads": ("full_attention", "num_key_value_heads"),
}
FIXED = {("olmo", "attention.layer_norm_epsilon"): 1e-5}  # constants of model classes that have no setting for them


@dataclass(frozen=True)
class Difference:
    """A setting whose value in the config differs from the value in the file.

    Attributes:
        said: the file's keys and tensors that determine the setting, with their values. For a tensor, the value is
            None.
        setting: the config's setting, or "" if the config has none.
        held: the value in the config.
        wanted: the value in the file.
        why: the explanation, if the config has no such setting.
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
        """Returns True if `ignore` selects one of the keys."""
        return any(selects(ignore, key) for key in self.said)


@dataclass(frozen=True)
class Case:
    """The data of a comparison. `complete` is the argument of `differences`, `head` the size of a head."""

    config: Any
    file: FileSettings
    complete: bool
    head: int

    def difference(self, key: str, setting: str, value: Any) -> Iterator[Difference]:
        """Yields a difference if a setting does not have the value that the key requires."""
        held = held_value(self.config, setting)
        if not same(held, value):
            yield Difference({self.file.full(key): self.file.values.get(key, value)}, setting, held, value)

    def nowhere(self, key: str, why: str = "") -> Difference:
        """Returns the difference for a key that has no setting in the config."""
        why = why or f"{type(self.config).__name__} has no setting for it"
        return Difference({self.file.full(key): self.file.values[key]}, why=why)


def has_setting(config: Any, name: str) -> bool:
    """Returns True if a config's class has a setting. Configs also store values that their class does not know."""
    if config.model_type in VARY_BY_LAYER and name in PER_LAYER:
        return True
    declared = getattr(type(config), "__dataclass_fields__", None)
    return hasattr(config, name) if declared is None else name in declared or name in type(config).attribute_map


def held_value(config: Any, name: str) -> Any:
    """Returns the value of a setting in a config."""
    if config.model_type not in VARY_BY_LAYER or name not in PER_LAYER:
        return getattr(config, name)
    kind, own = PER_LAYER[name]
    return getattr(config.per_layer_config[config.layer_types.index(kind) if kind in config.layer_types else 0], own)


def head_size(config: Any) -> int:
    """Returns the size of a head. If sizes vary, this is the size in layers without a sliding window."""
    name = "global_head_dim" if has_setting(config, "global_head_dim") else "head_dim"
    own = held_value(config, name) if has_setting(config, name) else getattr(config, name, None)
    return int(own or config.hidden_size // (getattr(config, "num_attention_heads", 0) or 1))


def is_latent(config: Any) -> bool:
    """Returns True if keys and values are computed from a latent vector, so that their heads have separate sizes."""
    return has_setting(config, "kv_lora_rank")


def plain(case: Case, name: str, key: Key, value: Any) -> Iterator[Difference]:
    """Yields a difference for a key that corresponds to a single setting."""
    setting = next((setting for setting in key.settings if has_setting(case.config, setting)), "")
    neutral = value in key.neutral
    if isinstance(value, list) or not isinstance(value, bool | int | float):
        yield case.nowhere(name, f"one number for all layers is expected for a {type(case.config).__name__}")
    elif not setting:
        fixed = FIXED.get((case.file.architecture, name))
        if not neutral and not (fixed is not None and same(fixed, value)) and not key.size:
            yield case.nowhere(name)
    elif not neutral:
        yield from case.difference(name, setting, value)
    elif held_value(case.config, setting) not in (*key.neutral, None):
        yield from case.difference(name, setting, key.off)
