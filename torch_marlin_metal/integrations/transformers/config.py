"""The `quantization_config` of models that are loaded, quantized and saved by this package."""

import copy
from collections.abc import Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_marlin_metal.checkpoints.formats.native import METHOD, NativeExporter
from torch_marlin_metal.formats import weight_format as find_format

# Arguments that a caller may change for a checkpoint that has settings of its own.
LOADING = ("modules_to_not_convert", "on_unsupported", "fuse")


class MarlinConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How `from_pretrained` loads 4-bit checkpoints, or quantizes others.

    For a directory that is quantized already, by this package or another one, only the loading arguments count: the
    weights are what the checkpoint says. Any other directory is quantized while it is loaded, one layer at a time.

    Args:
        weight_format: of layers quantized while loading, as in `quantize_weight`; so are the next two.
        group_size: see `quantize_weight`.
        method: "rtn" or "mse".
        modules_to_not_convert: layers that stay or become floats: names, parts of names or regular expressions, by
            transformers' own rule. None is the output layer for models quantized while loading, no layer for others.
        on_unsupported: "error", or "dequantize" to decode layers that cannot be represented (a loading argument).
        fuse: compute q, k, v projections in one call, and gate and up projections; see `fuse_projections` (a loading
            argument).
        layers: the layers of a saved model, by name; written by `save_pretrained`.
        quantize_options: `scale_dtype`, `lut`, `mx_rounding` of `quantize_weight`.

    Raises:
        ValueError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        weight_format: str = "uint4b8",
        group_size: int | None = None,
        method: str = "rtn",
        *,
        modules_to_not_convert: Sequence[str] | None = None,
        on_unsupported: str = "error",
        fuse: bool = False,
        layers: dict[str, dict[str, Any]] | None = None,
        quantize_options: dict[str, Any] | None = None,
    ) -> None:
        if on_unsupported not in ("error", "dequantize"):
            raise ValueError(f"MarlinConfig: on_unsupported: expected 'error' or 'dequantize', got {on_unsupported!r}")
        if method not in ("rtn", "mse"):
            raise ValueError(f"MarlinConfig: method: expected 'rtn' or 'mse', got {method!r}")
        self.quant_method = METHOD
        self.weight_format = find_format(weight_format).name
        self.group_size = group_size
        self.method = method
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.on_unsupported = on_unsupported
        self.fuse = fuse
        self.layers = layers
        self.quantize_options = dict(quantize_options or {})
        self.source: dict[str, Any] = {}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Takes the settings of a checkpoint, whatever its method: its reader interprets them."""
        config = cls(**loading_defaults())
        config.source = copy.deepcopy(dict(config_dict))
        return (config, kwargs) if return_unused_kwargs else config

    def get_loading_attributes(self) -> dict[str, Any]:
        """Returns the arguments that a config may change for a checkpoint with settings of its own."""
        return {name: copy.deepcopy(getattr(self, name)) for name in LOADING}

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings of docs/on-disk-format.md once layers are known, else the checkpoint's own."""
        if self.layers is not None:
            return NativeExporter(copy.deepcopy(self.layers)).settings()
        if self.source:
            return copy.deepcopy(self.source)
        shown = ("quant_method", "weight_format", "group_size", "method", *LOADING)
        return {name: copy.deepcopy(getattr(self, name)) for name in shown}


_defaults: dict[str, Any] = {}


def loading_defaults() -> dict[str, Any]:
    """Returns the loading arguments for checkpoints that are opened without a `MarlinConfig`; see `take_over`."""
    return copy.deepcopy(_defaults)


def set_loading_defaults(values: dict[str, Any]) -> None:
    """Replaces the loading arguments."""
    MarlinConfig(**values)
    _defaults.clear()
    _defaults.update(values)
