"""The rotary embedding that a GGUF file describes, as transformers settings and as frequencies to compare.

llama.cpp rotates pair i of a head by position * base^(-2i/D) / (factor_i * scale). YaRN mixes the scaled and the
unscaled frequency, and llama.cpp multiplies cosines and sines by an attention factor. Sources: `ggml_rope_ext` and
`rope_yarn` in ggml, and `llama_context` for the attention factor.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.checkpoints.formats.gguf_keys import ROPE_TENSORS, FileSettings, same

DEFAULT_BASE = 10000.0  # llama.cpp's base for files without the key
# llama.cpp's base for layers with a sliding window, in files without the key.
SLIDING_BASES = {"gemma3": 10000.0, "gemma4": 10000.0, "gemma3n": 10000.0}
LATENT = ("deepseek2", "mistral4", "glm-dsa")  # architectures with another attention scale for long contexts
VARY_BY_LAYER = ("gemma4_text",)  # model types whose settings vary by layer type
SCALING_KEYS = ("rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor")
CPU = torch.device("cpu")
# Relative tolerances: for factors, which the converter rounds to fp32, and for frequencies, which transformers computes
# in fp32.
FACTOR_TOLERANCE, FREQUENCY_TOLERANCE = 2e-6, 1e-5
# Gemma 4 rotates only the first pairs of a head. To stop the other pairs, llama.cpp divides their frequencies by at
# least this number.
UNTURNED = 1e29
# The settings of Llama 3.1, 3.2 and 3.3. Only their ratios to the context length have an effect.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class RopeError(ValueError):
    """No transformers setting expresses what a file states."""


@dataclass(frozen=True)
class Rope:
    """The rotary embedding for the layers of one type.

    Attributes:
        settings: `rope_parameters` for transformers.
        base: the base of the frequencies.
        dims: the number of rotated dimensions of a head, D.
        divisors: fp64 `[D / 2]`, the divisors of the plain frequencies in short and in long contexts. None if the file
            states no scaling.
        attention: the attention factor, or None if the file states none.
    """

    settings: dict[str, Any]
    base: float
    dims: int
    divisors: tuple[Tensor, Tensor] | None = None
    attention: float | None = None

    def plain(self) -> Tensor:
        """Returns the frequencies without scaling, fp64 `[D / 2]`."""
        return plain_frequencies(self.base, self.dims)


@dataclass(frozen=True)
class Scaling:
    """The scaling part of `Rope`: settings without base and dimensions, divisors and attention factor."""

    settings: dict[str, Any]
    divisors: tuple[Tensor, Tensor]
    attention: float | None = None


def plain_frequencies(base: float, dims: int) -> Tensor:
    """Computes base^(-2i/D) in fp64 `[D / 2]`."""
    return torch.pow(base, -torch.arange(0, dims, 2, dtype=torch.float64, device=CPU) / dims)


def states_rope(file: FileSettings) -> bool:
    """Returns True if a file has keys or tensors for the rotary embedding."""
    return any(key.startswith("rope.") for key in file.values) or any(name in file.tensors for name in ROPE_TENSORS)


def layer_types(config: Any) -> list[str | None]:
    """Returns the layer types with separate rotary settings in a config, or [None] if all layers share the settings."""
    held = config.rope_parameters or {}
    nested = [name for name, value in held.items() if isinstance(value, Mapping)]
    return list(nested) or [None]


def wanted(config: Any, file: FileSettings, layer_type: str | None, head: int, complete: bool) -> Rope:
    """Returns the rotary embedding of one layer type according to the file.

    Args:
        config: the model's config. It supplies the settings that the file lacks.
        file: the file's keys and tensors.
        layer_type: a name from `layer_types`.
        head: the size of a head.
        complete: True if llama.cpp's defaults replace missing keys, instead of the config's settings.

    Raises:
        RopeError: no transformers setting expresses what the file states.
    """
    parameters = config.rope_parameters or {}
    held: dict[str, Any] = dict(parameters if layer_type is None else parameters[layer_type])
    sliding = layer_type == "sliding_attention"
    base, count = file.number("rope.freq_base"), file.number("rope.dimension_count")
    if sliding:
        default = SLIDING_BASES.get(file.architecture) if complete else held.get("rope_theta")
        base = file.number("rope.freq_base_swa") or default or base
        count = file.number("rope.dimension_count_swa") or count
    elif complete:
        base, count = base or DEFAULT_BASE, count or head
    base = float(base or held.get("rope_theta") or DEFAULT_BASE)
    dims = int(count or head * (held.get("partial_rotary_factor") or 1.0))
    if base <= 1 or not 2 <= dims <= head:
        raise RopeError(f"a base above 1 and 2 to {head} dimensions are expected")
    rotary: dict[str, Any] = {"rope_theta": base}
    if dims != head or "partial_rotary_factor" in held:
        rotary["partial_rotary_factor"] = dims / head
    if sliding:  # llama.cpp does not scale layers with a sliding window
        return Rope({"rope_type": "default"} | rotary if complete else held | rotary, base, dims)
    stated = any(key in file.values for key in SCALING_KEYS) or any(name in file.tensors for name in ROPE_TENSORS)
    if not stated and not complete:
        return Rope(held | rotary, base, dims)
    scaling = _scaling(config, file, held, base, dims)
    return Rope(rotary | scaling.settings, base, dims, scaling.divisors, scaling.attention)


def _scaling(config: Any, file: FileSettings, held: Mapping[str, Any], base: float, dims: int) -> Scaling:
    """Returns the scaling that the file states. If the file has a factor but no type, the type is "linear"."""
    stated = file.values.get("rope.scaling.type", "linear")
    factor = float(file.number("rope.scaling.factor") or file.number("rope.scale_linear") or 1.0)
    if stated not in ("none", "linear", "yarn", "longrope"):
        raise RopeError(f"{stated!r} is not a known type of scaling")
    factor = 1.0 if stated == "none" else factor
    if factor <= 0:
        raise RopeError("a positive factor is expected")
    gain = float(file.number("rope.scaling.attn_factor") or 1.0)
    freqs, long, short = (_factors(file, name, dims) for name in ROPE_TENSORS)
    if stated == "yarn":
        if not (freqs is long is short is None):
            raise RopeError("transformers has no YaRN with rotary factors")
        return _yarn(config, file, held, base, dims, factor)
    if (long is None) != (short is None):
        raise RopeError("the file has only one of rope_factors_long and rope_factors_short")
    if long is not None and short is not None:
        if factor != 1.0 or freqs is not None:
            raise RopeError("transformers has no long and short factors with other scaling")
        return _longrope(config, file, short, long, gain if "rope.scaling.attn_factor" in file.values else None)
    if stated == "longrope":
        raise RopeError("the file has no rope_factors_long and rope_factors_short")
    if freqs is not None and bool((freqs >= UNTURNED).any()):
        return _proportional(freqs, factor)
    divisors = torch.full((dims // 2,), factor, dtype=torch.float64, device=CPU) if freqs is None else freqs * factor
    if gain != 1.0:
        return _longrope(config, file, divisors, divisors, gain)
    if bool((divisors == 1).all()):
        return Scaling({"rope_type": "default"}, (divisors, divisors), 1.0)
    if freqs is None:
        return Scaling({"rope_type": "linear", "factor": factor}, (divisors, divisors), 1.0)
    settings = llama3_settings(divisors, base, dims)
    if settings is None:
        return _longrope(config, file, divisors, divisors, 1.0)
    return Scaling(settings, (divisors, divisors), 1.0)


def _proportional(freqs: Tensor, factor: float) -> Scaling:
    turned = freqs < UNTURNED
    if factor != 1.0 or not bool((freqs[turned] == 1).all()) or bool(turned.logical_not().cumsum(0)[turned].any()):
        raise RopeError("transformers scales partly rotated heads only if the rotated pairs come first")
    settings = {"rope_type": "proportional", "partial_rotary_factor": int(turned.sum()) / len(freqs)}
    divisors = torch.where(turned, freqs, math.inf)
    return Scaling(settings, (divisors, divisors), 1.0)


def _factors(file: FileSettings, name: str, dims: int) -> Tensor | None:
    factors = file.factors(name)
    if factors is not None and (len(factors) != dims // 2 or not bool((factors > 0).all() & factors.isfinite().all())):
        raise RopeError(f"{name}: expected {dims // 2} positive factors, one for each pair, got {len(factors)}")
    return factors


def _context(config: Any, file: FileSettings, held: Mapping[str, Any]) -> int:
    """Returns the context length before scaling."""
    stated = file.number("rope.scaling.original_context_length") or held.get("original_max_position_embeddings")
    return int(stated or file.number("context_length") or config.max_position_embeddings)


def _yarn(config: Any, file: FileSettings, held: Mapping[str, Any], base: float, dims: int, factor: float) -> Scaling:
    held = held if held.get("rope_type") == "yarn" else {}
    if file.number("rope.scaling.yarn_ext_factor") not in (None, 1.0, -1.0):
        raise RopeError("transformers' YaRN has no rope.scaling.yarn_ext_factor")
    settings: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    settings["original_max_position_embeddings"] = _context(config, file, held)
    for name in ("beta_fast", "beta_slow"):
        value = file.number(f"rope.scaling.yarn_{name}")
        if value is not None or name in held:
            settings[name] = float(value if value is not None else held[name])
    # The file does not state how transformers rounds the range, so the config's setting is used.
    settings |= {"truncate": held["truncate"]} if "truncate" in held else {}
    magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    attention: float | None = None
    if (gain := file.number("rope.scaling.attn_factor")) is not None:
        # In files of OLMo, the value is transformers' attention factor. In other files, llama.cpp multiplies the value
        # by YaRN's factor.
        attention = gain if file.architecture == "olmo2" else gain * magnitude
    if (gain := file.number("rope.scaling.yarn_attn_factor")) is not None:
        attention = gain
    multiplier = file.number("rope.scaling.yarn_log_multiplier")
    if multiplier and file.architecture in LATENT:
        # llama.cpp has one value for two settings of transformers. The file has a tenth of the value.
        settings |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * multiplier, 6))
    elif multiplier:
        attention = (attention or magnitude) / (0.1 * multiplier * math.log(factor) + 1.0 if factor > 1.0 else 1.0)
    if attention is not None:
        settings["attention_factor"] = attention
    else:
        settings |= {name: held[name] for name in ("attention_factor", "mscale", "mscale_all_dim") if name in held}
    if beta := file.number("attention.temperature_scale"):
        settings["llama_4_scaling_beta"] = beta
    divisors = _yarn_divisors(settings, base, dims)
    return Scaling(settings, (divisors, divisors), attention)


def _yarn_divisors(settings: Mapping[str, Any], base: float, dims: int) -> Tensor:
    """Returns the divisors of the plain frequencies, fp64 `[D / 2]`, with the mix of `rope_yarn` in ggml."""

    def pair(rotations: float) -> float:
        """Returns the pair that rotates this often within the original context."""
        length = settings["original_max_position_embeddings"]
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(settings.get("beta_fast") or 32.0), pair(settings.get("beta_slow") or 1.0)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float64, device=CPU) - low) / max(0.001, high - low)
    unscaled = 1 - ramp.clamp(0, 1)
    return torch.reciprocal((1 - unscaled) / settings["factor"] + unscaled)


def _longrope(config: Any, file: FileSettings, short: Tensor, long: Tensor, attention: float | None) -> Scaling:
    settings: dict[str, Any] = {"rope_type": "longrope"}
    settings |= {"short_factor": short.tolist(), "long_factor": long.tolist()}
    settings["original_max_position_embeddings"] = _context(config, file, {})
    if attention is not None:
        settings["attention_factor"] = attention
    return Scaling(settings, (short, long), attention)


def llama3_settings(factors: Tensor, base: float, dims: int) -> dict[str, Any] | None:
    """Returns transformers' settings of type "llama3" that reproduce the factors, or None if there are none.

    Let C be `original_max_position_embeddings`, and wave the wavelength of a pair in positions. The converter divides
    the pair's frequency by the factor if wave > C / low, and by 1 if wave < C / high. Between these limits, it divides
    by 1 / ((1 - s) / factor + s) with s = (C / wave - low) / (high - low). The factors determine only C / low and
    C / high, not C, low and high. The values of Llama 3 are therefore tried first, then low = 1.

    Args:
        factors: fp64 `[D / 2]`, from the file.
        base: the base of the frequencies.
        dims: D.
    """
    turns = plain_frequencies(base, dims) / (2 * math.pi)  # turns per position: 1 / wave
    largest = round(float(factors.max()), 6)
    candidates = [{"factor": largest} | LLAMA3]
    between = ((factors > 1) & (factors < factors.max())).nonzero().flatten()
    if len(between) > 1:
        share = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
        ends = between[[0, -1]]
        slope = float((share[0] - share[-1]) / (turns[ends[0]] - turns[ends[1]]))
        offset = float(slope * turns[ends[0]] - share[0])
        if slope > 0 and offset > 0:
            length, high = round(slope / offset), 1 + 1 / offset
            candidates += [
                {"factor": largest, "low_freq_factor": 1.0, "high_freq_factor": value}
                | {"original_max_position_embeddings": length}
                for value in (round(high, 2), high)
            ]
    for settings in candidates:
        if torch.allclose(_llama3_factors(settings, turns), factors, rtol=FACTOR_TOLERANCE, atol=0):
            return {"rope_type": "llama3", **settings}
    return None


def _llama3_factors(settings: Mapping[str, Any], turns: Tensor) -> Tensor:
    low, high, factor = settings["low_freq_factor"], settings["high_freq_factor"], settings["factor"]
    share = ((settings["original_max_position_embeddings"] * turns - low) / (high - low)).clamp(0, 1)
    return torch.reciprocal((1 - share) / factor + share)


def computed(model: nn.Module, config: Any, layer_type: str | None, scaled: bool) -> Iterator[tuple[Tensor, float]]:
    """Yields (frequencies, attention factor) as a model computes them, for short and for long contexts.

    Without `scaled`, these are the plain frequencies before scaling. Yields nothing if the model has no transformers
    rotary embedding.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = next((module for module in model.modules() if hasattr(module, "compute_default_rope_parameters")), None)
    if rotary is None:
        return
    held = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    if config.model_type in VARY_BY_LAYER:
        config = config.per_layer_config[layer_type]
    kind = held.get("rope_type", "default") if scaled else "default"
    function: Any = rotary.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    types = {} if layer_type is None else {"layer_type": layer_type}
    long = {"seq_len": held["original_max_position_embeddings"] + 1} if kind == "longrope" else {}
    for length in ({}, long):
        yield function(config, **types, **length)


def includes(held: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Returns True if a config's rotary settings contain all the given settings."""
    return all(name in held and same(held[name], value) for name, value in settings.items())


def differs(model: nn.Module, config: Any, rope: Rope, layer_type: str | None) -> bool:
    """Returns True if a model computes another rotary embedding than `rope`."""
    scaled = rope.divisors is not None
    divisors = rope.divisors or (torch.ones(1, dtype=torch.float64, device=CPU),) * 2
    found = list(computed(model, config, layer_type, scaled))
    if not found:
        held = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        return not includes(held, rope.settings)
    for (frequencies, attention), divisor in zip(found, divisors, strict=True):
        expected = rope.plain() / divisor
        if frequencies.shape != expected.shape:
            return True
        if not torch.allclose(frequencies.double(), expected, rtol=FREQUENCY_TOLERANCE, atol=0):
            return True
        if rope.attention is not None and not math.isclose(attention, rope.attention, rel_tol=FREQUENCY_TOLERANCE):
            return True
    return False
