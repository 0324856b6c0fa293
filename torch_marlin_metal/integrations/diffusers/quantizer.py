"""The quantizer that diffusers calls when it loads or saves a model with packed layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.utils import logging
from torch import Tensor, nn

from torch_marlin_metal.checkpoints.directory import open_reader
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.formats.native import NativeExporter
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.extension import require
from torch_marlin_metal.integrations.choice import ChoosesLayers, choose_layers
from torch_marlin_metal.integrations.transformers.config import MarlinConfig
from torch_marlin_metal.integrations.transformers.packed_checkpoint import (
    check_devices,
    check_files,
    device_of,
)
from torch_marlin_metal.layers.fuse import fuse_projections, unfused
from torch_marlin_metal.load.caller import Caller
from torch_marlin_metal.load.converted import ConvertedReader
from torch_marlin_metal.load.decoded import float_module
from torch_marlin_metal.load.loader import Loader
from torch_marlin_metal.load.row_tensor import has_stand_ins
from torch_marlin_metal.models.linear_layers import ModelMismatchError, packed_layer, shared_weights
from torch_marlin_metal.models.prepare import prepare
from torch_marlin_metal.models.savers import round_as_diffusers
from torch_marlin_metal.models.swap import inherit
from torch_marlin_metal.patterns import check_patterns, selects

OP = "from_pretrained"
logger = logging.get_logger(__name__)


class MarlinDiffusersQuantizer(ChoosesLayers, DiffusersQuantizer):  # type: ignore[misc]
    """Puts `MarlinLinear` layers into diffusers models. `from_pretrained` creates and calls the quantizer."""

    use_keep_in_fp32_modules = True
    quantization_config: MarlinConfig

    def __init__(self, quantization_config: MarlinConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._reader: CheckpointReader | None = None
        self._loader: Loader | None = None
        self._saved: nn.Module | None = None
        self._dtype: torch.dtype | None = None
        self._single: str | None = None  # the single file that is being loaded
        self._has_directory = False
        self.op = OP

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises an error for devices without kernels, and for options that only transformers models support."""
        require(OP)
        if self.quantization_config.fuse == "layers":
            raise ValueError(f"{OP}: fuse: expected True or False for a model of diffusers, got 'layers'")
        for name in ("memory", "like"):
            if (value := getattr(self.quantization_config, name)) is not None:
                raise ValueError(
                    f"{OP}: {name}: expected None for a model of diffusers, got {value!r}: load it without, and call "
                    "quantize_model"
                )
        if isinstance(device_map, dict):
            check_devices(OP, device_map)

    @property
    def supports_parallel_loading(self) -> bool:
        """Returns False: layers are quantized one after the other."""
        return False

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Opens the directory that diffusers found, and hides the tensors of packed layers from diffusers."""
        self._has_directory = True
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
        wide = set(keep_in_fp32_modules or ())
        if self.pre_quantized:
            excluded: Any = self.quantization_config.modules_to_not_convert
            if (state := kwargs.get("state_dict")) is not None:
                excluded = self._open_file(model, state, wide)
            assert self._reader is not None
            caller = Caller(
                op=self.op,
                find=lambda name: name,
                ties=shared_weights(model),
                exclude=excluded,
                exclude_argument="modules_to_not_convert",
                ignore=self.quantization_config.ignore,
                hosted=True,
                device_of=lambda name: device_of(device_map, name),
                progress=logging.is_progress_bar_enabled(),
            )
            self._loader = Loader(model, self._reader, caller, logger.warning)
            if prefix := self._loader.plan.prefix:
                raise ModelMismatchError(
                    f"{self.op}: {self._reader.path}: names begin with {prefix!r}, which {type(model).__name__} "
                    "lacks; load_quantized removes it"
                )
            self._loader.place()
            return

        def stays(name: str) -> str:
            return "diffusers keeps this part in float32" if wide & set(name.split(".")) else ""

        chosen, self._recipe = choose_layers(self.op, model, self.quantization_config, stays)
        self._chosen = {f"{name}.weight" for name in chosen}

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype | None:
        """Stores the dtype for a single file's model, which diffusers creates in fp32, and returns the dtype."""
        self._dtype = torch_dtype
        return torch_dtype

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Determines if a single file is packed. Other files are quantized while they are loaded."""
        if self._has_directory:  # `from_pretrained` calls this method for each shard
            return state_dict
        self.pre_quantized, self.op = has_stand_ins(state_dict), "from_single_file"
        self._single = str(ConvertedReader.of(state_dict).path) if self.pre_quantized else "the file"
        return state_dict

    def _open_file(self, model: Any, state: dict[str, Any], wide: set[str]) -> Callable[..., bool]:
        """Leaves in `state` only tensors that diffusers loads. Returns the function that selects layers to decode."""
        for name, parameter in model.named_parameters():
            dtype = torch.float32 if wide & set(name.split(".")) else self._dtype
            if dtype is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        self._reader = reader = ConvertedReader.of(state)
        chosen = self.quantization_config.modules_to_not_convert
        check_patterns(self.op, reader.names(), modules_to_not_convert=chosen)
        state.clear()
        state.update({name: read() for name, read, _ in reader.others()})
        return lambda name, *module: selects(chosen, name) or bool(wide & set(name.split(".")))

    def update_missing_keys(self, model: Any, missing_keys: list[str], prefix: str) -> list[str]:
        """Raises an error if the directory lacks a weight that was selected for quantization."""
        if lost := sorted(self._chosen.intersection(missing_keys)):
            raise CheckpointError(f"{self.op}: {type(model).__name__}: the directory has no tensor {lost[0]!r}")
        return missing_keys

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, state_dict: dict[str, Any], **kwargs: Any
    ) -> bool:
        """Returns True if `create_quantized_param` loads the tensor."""
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
        name = param_name.rpartition(".")[0]
        module = model.get_submodule(name)
        packed = self._packed_weight(name, param_value)
        # The bias may be read later. Until then, the layer has an empty weight, which diffusers can move to a device.
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
        if self._single is not None:
            self._check_complete(model, self._single)
        model.is_quantized = False  # with True, diffusers refuses .half() and .to(dtype)
        if self.quantization_config.fuse:
            fuse_projections(model)
        round_as_diffusers(model)
        if self.quantization_config.prepare:
            prepare(model, progress=logging.is_progress_bar_enabled())
        return model

    def _check_complete(self, model: Any, file: str) -> None:
        """Raises an error if a single file lacks tensors. diffusers would leave them uninitialized."""
        lost = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise CheckpointError(
                f"{self.op}: {file}: no tensor for {lost[0]!r}{more} of a {type(model).__name__}; expected a file of "
                "the whole model, with the settings (config=...) that belong to it"
            )

    @contextmanager
    def saving(self, model: Any) -> Iterator[None]:
        """Inside the block, the model's configuration describes its packed layers, for diffusers to save."""
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
        """Returns the tensors for `save_pretrained`. Fused layers are split into the original layers."""
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
        """Returns False: the packed weights cannot be trained."""
        return False
