"""Registers the quantizer in diffusers' tables, and wraps methods and the property `dtype` of diffusers' models."""

import functools
from pathlib import Path
from typing import Any

import diffusers.quantizers.auto as tables
import torch
from diffusers import ModelMixin

from torch_marlin_metal.checkpoints.card import write_card
from torch_marlin_metal.checkpoints.formats.native import METHOD
from torch_marlin_metal.checkpoints.options import spelled
from torch_marlin_metal.integrations.counting import packed_dtype
from torch_marlin_metal.integrations.diffusers.quantizer import MarlinDiffusersQuantizer
from torch_marlin_metal.integrations.diffusers.single_file import take_files
from torch_marlin_metal.integrations.transformers.config import MarlinConfig, as_config
from torch_marlin_metal.integrations.transformers.take_over import STOPS, takes_own
from torch_marlin_metal.layers.fuse import unfused


def install() -> None:
    """Registers the quantizer and wraps methods of diffusers' models. A second call does nothing."""
    if METHOD in tables.AUTO_QUANTIZER_MAPPING:
        return
    tables.AUTO_QUANTIZER_MAPPING[METHOD] = MarlinDiffusersQuantizer
    configs = tables.AUTO_QUANTIZATION_CONFIG_MAPPING
    configs[METHOD] = MarlinConfig
    configs[STOPS] = takes_own(configs[STOPS])
    _take_arguments()
    take_files()
    load = ModelMixin.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with spelled(as_config):
            return load(cls, *args, **kwargs)

    ModelMixin.from_pretrained = classmethod(from_pretrained)
    original = ModelMixin.save_pretrained

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if next(unfused(self), None) is None:
            return original(self, save_directory, *args, **kwargs)
        if not isinstance(getattr(self, "hf_quantizer", None), MarlinDiffusersQuantizer):
            self.hf_quantizer = MarlinDiffusersQuantizer(MarlinConfig(), pre_quantized=True)
        with self.hf_quantizer.saving(self):
            result = original(self, save_directory, *args, **kwargs)
        if Path(save_directory).is_dir():
            write_card(Path(save_directory))
        return result

    ModelMixin.save_pretrained = save_pretrained
    first_dtype = ModelMixin.dtype.fget

    def dtype(self: Any) -> torch.dtype | None:
        held, kept = packed_dtype(self), tuple(self._keep_in_fp32_modules or ())
        floats = (name for name, one in self.named_parameters() if one.is_floating_point())
        if held is not None and all(any(part in name for part in kept) for name in floats):
            return held  # diffusers would return the dtype of the first buffer, a packed layer's scales
        return first_dtype(self)  # type: ignore[no-any-return]

    ModelMixin.dtype = property(dtype, doc=ModelMixin.dtype.__doc__)


def _take_arguments() -> None:
    """Makes diffusers use the `MarlinConfig` that a script passes for a packed directory."""
    merge = tables.DiffusersAutoQuantizer.merge_quantization_configs.__func__

    def merge_quantization_configs(cls: Any, settings: Any, given: Any) -> Any:
        if not isinstance(given, MarlinConfig):
            return merge(cls, settings, given)
        merged = merge(cls, settings, None)
        if isinstance(merged, MarlinConfig):
            for name, value in given.get_loading_attributes().items():
                setattr(merged, name, value)
        return merged

    tables.DiffusersAutoQuantizer.merge_quantization_configs = classmethod(merge_quantization_configs)
