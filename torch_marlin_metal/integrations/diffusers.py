"""Importing this module makes diffusers quantize models while it loads them, and save and load packed models.

    import torch_marlin_metal.integrations.diffusers
    from torch_marlin_metal.integrations.diffusers import MarlinConfig
    model = FluxTransformer2DModel.from_pretrained(path, quantization_config=MarlinConfig("uint4", 32))

`MarlinConfig` is the same class as for transformers. diffusers has a table that maps a config's `quant_method` to a
quantizer; importing this module adds an entry. `quantize_model` imports this module for models of diffusers, so that
their `save_pretrained` writes this package's format.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers.quantizers.auto as tables
import torch
from diffusers import ModelMixin
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.utils import logging
from torch import Tensor, nn

from torch_marlin_metal.checkpoints.card import write_card
from torch_marlin_metal.checkpoints.directory import open_reader
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.formats.native import METHOD, NativeExporter
from torch_marlin_metal.checkpoints.options import spelled
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.extension import require
from torch_marlin_metal.integrations.choice import choose_layers, quantized
from torch_marlin_metal.integrations.transformers.config import MarlinConfig, as_config
from torch_marlin_metal.integrations.transformers.packed_checkpoint import (
    check_devices,
    check_files,
    device_of,
)
from torch_marlin_metal.integrations.transformers.take_over import STOPS, takes_own
from torch_marlin_metal.layers.fuse import fuse_projections, unfused
from torch_marlin_metal.load.decoded import float_module
from torch_marlin_metal.load.door import Door
from torch_marlin_metal.load.loader import Loader
from torch_marlin_metal.load.plan import shared_weights
from torch_marlin_metal.models.empty_model import ModelMismatchError, packed_layer
from torch_marlin_metal.models.prepare import prepare
from torch_marlin_metal.models.swap import inherit
from torch_marlin_metal.packed_weight import PackedWeight

__all__ = ["MarlinConfig", "MarlinDiffusersQuantizer"]

OP = "from_pretrained"
logger = logging.get_logger(__name__)


class MarlinDiffusersQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """Puts `MarlinLinear` layers into models of diffusers; their `from_pretrained` creates and calls it."""

    use_keep_in_fp32_modules = True
    quantization_config: MarlinConfig

    def __init__(self, quantization_config: MarlinConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._reader: CheckpointReader | None = None
        self._loader: Loader | None = None
        self._chosen: set[str] = set()
        self._made: dict[str, tuple[PackedWeight, torch.dtype]] = {}
        self._saved: nn.Module | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuses devices that have no kernels, and fuse="layers", which only models of transformers support."""
        require(OP)
        if self.quantization_config.fuse == "layers":
            raise ValueError(f"{OP}: fuse: expected True or False for a model of diffusers, got 'layers'")
        if isinstance(device_map, dict):
            check_devices(OP, device_map)

    def update_device_map(self, device_map: Any) -> Any:
        """Replaces "auto" and its variants by mps if the machine has it, else by the CPU."""
        if isinstance(device_map, str):
            return {"": torch.device("mps" if torch.backends.mps.is_available() else "cpu")}
        return device_map

    @property
    def supports_parallel_loading(self) -> bool:
        """Returns False: layers are quantized one after the other."""
        return False

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Opens the directory that diffusers found, and hides the tensors of packed layers from diffusers."""
        if not self.pre_quantized:
            return loaded_keys
        self._reader = open_reader(Path(checkpoint_files[0]).parent, self.quantization_config.read_options())
        check_files(self._reader, (Path(file).name for file in checkpoint_files))
        packed = self._reader.tensor_files().keys() - {name for name, _, _ in self._reader.others()}
        return [key for key in loaded_keys if key not in packed]

    def _process_model_before_weight_loading(
        self,
        model: Any,
        device_map: dict[str, Any] | None = None,
        keep_in_fp32_modules: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.pre_quantized:
            assert self._reader is not None
            door = Door(
                op=OP,
                find=lambda name: name,
                ties=shared_weights(model),
                exclude=self.quantization_config.modules_to_not_convert,
                exclude_argument="modules_to_not_convert",
                ignore=self.quantization_config.ignore,
                hosted=True,
                device_of=lambda name: device_of(device_map, name),
                progress=logging.is_progress_bar_enabled(),
            )
            self._loader = Loader(model, self._reader, door, logger.warning)
            if prefix := self._loader.plan.prefix:
                raise ModelMismatchError(
                    f"{OP}: {self._reader.path}: names begin with {prefix!r}, which {type(model).__name__} lacks; "
                    "load_quantized removes it"
                )
            self._loader.place()
            return
        wide = set(keep_in_fp32_modules or ())

        def stays(name: str) -> str:
            return "diffusers keeps this part in float32" if wide & set(name.split(".")) else ""

        chosen = choose_layers(OP, model, self.quantization_config, stays)
        self._chosen = {f"{name}.weight" for name in chosen}

    def update_missing_keys(self, model: Any, missing_keys: list[str], prefix: str) -> list[str]:
        """Refuses a directory that lacks a weight that was to be quantized."""
        if lost := sorted(self._chosen.intersection(missing_keys)):
            raise CheckpointError(f"{OP}: {type(model).__name__}: the directory has no tensor {lost[0]!r}")
        return missing_keys

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, state_dict: dict[str, Any], **kwargs: Any
    ) -> bool:
        """Returns whether `create_quantized_param` takes a tensor."""
        return param_name in self._chosen

    def create_quantized_param(
        self,
        model: Any,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        state_dict: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Quantizes a weight."""
        name = param_name.rpartition(".")[0]
        module = model.get_submodule(name)
        packed = quantized(OP, name, param_value, self.quantization_config)
        # The bias may be read later. Until then the layer keeps an empty weight, which diffusers can move to a device.
        self._made[name] = packed.to(target_device), param_value.dtype
        module.weight = nn.Parameter(packed.scales.new_empty(packed.N, 0, dtype=param_value.dtype), requires_grad=False)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self._loader is not None:
            self._loader.fill()
            self._loader = self._reader = None
        for name, (packed, dtype) in self._made.items():
            linear = model.get_submodule(name)
            layer = packed_layer(linear, packed, dtype)
            inherit(layer, linear)
            model.set_submodule(name, layer)
        self._made.clear()
        model.is_quantized = False  # if true, diffusers refuses .half() and .to(dtype)
        if self.quantization_config.fuse:
            fuse_projections(model)
        if self.quantization_config.prepare:
            prepare(model, progress=logging.is_progress_bar_enabled())
        return model

    @contextmanager
    def saving(self, model: Any) -> Iterator[None]:
        """Describes the packed layers in the model's configuration, while diffusers writes it and their tensors."""
        exporter = NativeExporter()
        for name, weight in unfused(model):
            exporter.describe(weight, name)
        self.quantization_config.layers = exporter.layers
        model.register_to_config(quantization_config=self.quantization_config)
        self._saved = model
        try:
            yield
        finally:
            self._saved = None

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the tensors for `save_pretrained`. Fused layers are split again."""
        assert self._saved is not None
        packed, exporter = dict(unfused(self._saved)), NativeExporter()
        inside = tuple(f"{name}." for name in packed)
        state = {name: value for name, value in state_dict.items() if not name.startswith(inside)}
        for name, weight in packed.items():
            state |= {f"{name}.{key}": value for key, value in exporter.own_tensors(weight, name).items()}
        return state, {}

    def _dequantize(self, model: Any) -> Any:
        for name, packed in list(unfused(model)):
            old = model.get_submodule(name)
            model.set_submodule(name, float_module(old, None, packed, old.weight.dtype))
        model._internal_dict = type(model.config)(
            {key: value for key, value in model.config.items() if key != "quantization_config"}
        )
        return model

    @property
    def is_serializable(self) -> bool:
        """Returns True: `save_pretrained` writes this package's format (docs/formats/formats.md)."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Returns False: weights are constant."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Returns True: `torch.compile` takes packed layers."""
        return True


def install() -> None:
    """Registers the quantizer and wraps two methods of `ModelMixin`; a second call does nothing."""
    if METHOD in tables.AUTO_QUANTIZER_MAPPING:
        return
    tables.AUTO_QUANTIZER_MAPPING[METHOD] = MarlinDiffusersQuantizer
    configs = tables.AUTO_QUANTIZATION_CONFIG_MAPPING
    configs[METHOD] = MarlinConfig
    configs[STOPS] = takes_own(configs[STOPS])
    _take_arguments()
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


def _take_arguments() -> None:
    """Makes diffusers use the arguments of a `MarlinConfig` that a script passes for a packed directory."""
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


install()
