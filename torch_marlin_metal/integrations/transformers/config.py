"""The `quantization_config` of models that this package loads, quantizes and saves."""

import copy
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal

from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_marlin_metal.checkpoints.formats.native import METHOD, NativeExporter
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.layers.widths import check_widths
from torch_marlin_metal.patterns import parts_of_names
from torch_marlin_metal.quantize.recipe import Recipe
from torch_marlin_metal.repack import ZerosRule

# Arguments for quantized checkpoints. `READING` are the arguments that `ReadOptions` has too.
READING = ("on_unsupported", "allow_pickle", "gptq_version", "gptq_zeros_rule")
LOADING = ("modules_to_not_convert", "ignore", "fuse", "prepare", *READING)


class Method(str, Enum):
    """The `quant_method` of this package. It is an enumeration because diffusers reads its `.value`."""

    NATIVE = METHOD

    def __str__(self) -> str:
        return str(self.value)


class MarlinConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Options of `from_pretrained` for loading packed checkpoints and for quantizing float checkpoints.

    Supported are models of transformers and, after `import torch_marlin_metal.integrations.diffusers`, of diffusers.

    A float checkpoint is quantized during loading, one layer at a time. For a quantized checkpoint, only
    `modules_to_not_convert`, `fuse`, `prepare`, `ignore` and the arguments from `on_unsupported` to `gptq_zeros_rule`
    have an effect.

    Args:
        weight_format: the target format, as in `quantize_weight`.
        group_size: see `quantize_weight`.
        method: "rtn" or "mse".
        modules_to_not_convert: a pattern or a list of patterns for full layer names ("*.o_proj"), like `exclude` of
            `quantize_model`. The selected layers stay in floats or, in a quantized checkpoint, are decoded to floats. A
            name without wildcards selects every layer whose name contains it as a part ("o_proj", "layers.0"), as in
            transformers' configs. A pattern that matches no layer is an error.
        vocabulary_format: the format of embeddings and output layers, as in `quantize_model`. "none" keeps them in
            floats.
        memory: as in `quantize_model`, for transformers models only. The weights are read twice.
        like: as in `quantize_model`, for transformers models only.
        quantize_head: True to quantize a classifier's head too.
        fuse: True to compute the q, k and v projections in one call, and the gate and up projections in another; see
            `fuse_projections`. "layers" also fuses the operations between the products; see `fuse_layers`.
        prepare: True to compile the Metal kernels of layers that are loaded to mps; see `prepare`.
        ignore: a pattern or a list of patterns for full names of checkpoint layers that the model may lack, for example
            a block for multi-token prediction ("model.layers.61.*"). These layers are not loaded. The patterns also
            select keys of a GGUF file that may contradict the model's config ("llama.rope.*").
        on_unsupported: the action for layers that no weight format can represent, for example E5M2. By default they are
            decoded to floats, and one warning states their total bytes. "error" raises an error.
        allow_pickle: True to read PyTorch pickles too; see `ReadOptions`.
        gptq_version: the version of a GPTQ checkpoint, if its settings state the wrong version; see `ReadOptions`.
        gptq_zeros_rule: the rule for some zero points of GPTQ version 1; see `ReadOptions`.
        layers: the layers of a saved model, by name. `save_pretrained` sets this argument.
        quantize_options: `scale_dtype`, `lut`, `mx_rounding` of `quantize_weight`.

    Raises:
        ValueError: an argument is invalid. The message names the argument.
    """

    bits = 4  # other methods' configs have this attribute, and programs print it

    def __init__(
        self,
        weight_format: str = "uint4b8",
        group_size: int | None = None,
        method: str = "rtn",
        *,
        modules_to_not_convert: str | Sequence[str] | None = None,
        vocabulary_format: str | None = None,
        memory: str | int | None = None,
        like: str | None = None,
        quantize_head: bool = False,
        fuse: bool | Literal["layers"] = False,
        prepare: bool = False,
        ignore: str | Sequence[str] | None = None,
        on_unsupported: Literal["error", "dequantize"] = "dequantize",
        allow_pickle: bool = False,
        gptq_version: int | None = None,
        gptq_zeros_rule: ZerosRule = "word",
        layers: dict[str, dict[str, Any]] | None = None,
        quantize_options: dict[str, Any] | None = None,
    ) -> None:
        if on_unsupported not in ("error", "dequantize"):
            raise ValueError(f"MarlinConfig: on_unsupported: expected 'error' or 'dequantize', got {on_unsupported!r}")
        if not (fuse is True or fuse is False or fuse == "layers"):
            raise ValueError(f"MarlinConfig: fuse: expected True, False or 'layers', got {fuse!r}")
        self.quant_method = Method.NATIVE
        self.weight_format = weight_format
        self.group_size = group_size
        self.method = method
        names = _patterns(modules_to_not_convert)
        self.modules_to_not_convert = None if names is None else parts_of_names(names)
        self.vocabulary_format = vocabulary_format
        self.memory, self.like = memory, like
        check_widths("MarlinConfig", memory, like)
        self.quantize_head = quantize_head
        self.fuse = fuse
        self.prepare = prepare
        self.ignore = _patterns(ignore)
        self.on_unsupported = on_unsupported
        self.allow_pickle = allow_pickle
        self.gptq_version = gptq_version
        self.gptq_zeros_rule = gptq_zeros_rule
        self.read_options()
        self.layers = layers
        self.quantize_options = dict(quantize_options or {})
        self.recipe()
        self.source: dict[str, Any] = {}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Makes a config from the settings of any checkpoint. The checkpoint's reader interprets these settings."""
        config = cls(**loading_defaults())
        config.source = copy.deepcopy(dict(config_dict))
        return (config, kwargs) if return_unused_kwargs else config

    def get_loading_attributes(self) -> dict[str, Any]:
        """Returns the arguments that apply to quantized checkpoints."""
        return {name: copy.deepcopy(getattr(self, name)) for name in LOADING}

    def read_options(self) -> ReadOptions:
        """Returns the options for the reader of a quantized checkpoint.

        Raises:
            ValueError: an argument is invalid.
        """
        fields = {name: getattr(self, name) for name in READING if getattr(self, name) is not None}
        return ReadOptions.of(None, fields)

    def recipe(self) -> Recipe:
        """Returns the recipe for quantizing a model of floats.

        Raises:
            ValueError: an argument is invalid.
        """
        options = self.quantize_options
        try:
            return Recipe(self.weight_format, self.group_size, self.method, self.vocabulary_format, options)
        except ValueError as error:
            raise ValueError(f"MarlinConfig: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings of docs/formats/formats.md or, if no layers are known, the checkpoint's own settings."""
        if self.layers is not None:
            return NativeExporter(copy.deepcopy(self.layers)).settings()
        if self.source:
            return copy.deepcopy(self.source)
        shown = (
            "weight_format",
            "group_size",
            "method",
            "vocabulary_format",
            "memory",
            "like",
            "quantize_head",
            *LOADING,
        )
        return {"quant_method": METHOD} | {name: copy.deepcopy(getattr(self, name)) for name in shown}


def _patterns(names: str | Sequence[str] | None) -> list[str] | None:
    return None if names is None else [names] if isinstance(names, str) else list(names)


_defaults: dict[str, Any] = {}


def loading_defaults() -> dict[str, Any]:
    """Returns the arguments for checkpoints that are loaded without a `MarlinConfig`; see `take_over`."""
    return copy.deepcopy(_defaults)


def set_loading_defaults(values: dict[str, Any]) -> None:
    """Replaces the arguments that `loading_defaults` returns."""
    MarlinConfig(**values)
    _defaults.clear()
    _defaults.update(values)


def as_config(option: str, value: object) -> str:
    """Formats an option as an argument of `from_pretrained` in transformers and diffusers."""
    return f"quantization_config=MarlinConfig({option if value is None else f'{option}={value!r}'})"
