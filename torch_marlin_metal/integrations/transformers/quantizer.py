"""transformers' `HfQuantizer` for this package: loads packed checkpoints, quantizes float checkpoints, and saves.

`packed_checkpoint.py` loads the packed layers, and `while_loading.py` quantizes floats.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from torch_marlin_metal.checkpoints.directory import open_reader
from torch_marlin_metal.checkpoints.errors import NotQuantized, UnsupportedFormat
from torch_marlin_metal.checkpoints.formats.native import NativeExporter
from torch_marlin_metal.checkpoints.settings import names_no_layer
from torch_marlin_metal.extension import require
from torch_marlin_metal.fuse.layers import fuse_layers
from torch_marlin_metal.integrations.choice import ChoosesLayers, choose_layers
from torch_marlin_metal.integrations.transformers.config import MarlinConfig
from torch_marlin_metal.integrations.transformers.float_experts import FloatExperts, MergedOneByOne
from torch_marlin_metal.integrations.transformers.names import rearranges, siblings, tied_modules
from torch_marlin_metal.integrations.transformers.packed_checkpoint import (
    OP,
    PackedCheckpoint,
    check_devices,
    check_files,
)
from torch_marlin_metal.integrations.transformers.parallel import check_sizes, split_of
from torch_marlin_metal.integrations.transformers.stored import decode_stacks, empty_model, stored_layers
from torch_marlin_metal.integrations.transformers.while_loading import QuantizeWhileLoading, samples_of
from torch_marlin_metal.joined_weights import same_values
from torch_marlin_metal.layers.float_experts import find_module, is_experts
from torch_marlin_metal.layers.fuse import fuse_projections, unfused
from torch_marlin_metal.layers.packed_layer import PackedLayer
from torch_marlin_metal.layers.stays import IN_HEAD, staying_layers
from torch_marlin_metal.layers.vocabulary import vocabulary_of
from torch_marlin_metal.load.decoded import float_module
from torch_marlin_metal.load.model_tensors import initialized
from torch_marlin_metal.load.unset import watch
from torch_marlin_metal.models.experts import NamedExperts
from torch_marlin_metal.models.linear_layers import is_transposed, packed_layer
from torch_marlin_metal.models.prepare import prepare
from torch_marlin_metal.models.swap import inherit

logger = logging.get_logger(__name__)


class MarlinQuantizer(ChoosesLayers, HfQuantizer):  # type: ignore[misc]
    """Puts `MarlinLinear` layers into transformers models. `from_pretrained` creates and calls the quantizer."""

    requires_calibration = False
    op = OP
    quantization_config: MarlinConfig

    def __init__(self, quantization_config: MarlinConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._packed: PackedCheckpoint | None = None
        self._device_map: dict[str, Any] | None = None
        self._conversions: list[Any] = []
        self._failure: Exception | None = None
        self.float_experts: FloatExperts | None = None
        self.reinitializes = False  # the argument `ignore_mismatched_sizes` of from_pretrained

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises an error for devices without kernels, and for any device if the compiled extension is missing."""
        require(OP)
        if isinstance(device_map, dict):
            check_devices(OP, device_map)

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Does not change the plan. `PackedCheckpoint.fill` finds the rules of packed layers by their modules."""

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self._device_map = device_map
        watch(model, OP)
        has_parts = check_sizes(OP, model, self.pre_quantized)
        if self.pre_quantized:
            self._open(checkpoint_files, has_parts)
            if self._packed is not None:
                self._packed.read_ahead()
        else:
            self._choose(model, checkpoint_files)

    def _open(self, checkpoint_files: list[str] | None, has_parts: bool) -> None:
        if not checkpoint_files:
            raise UnsupportedFormat(f"{OP}: a packed checkpoint is read from files; got a state_dict")
        directory = Path(checkpoint_files[0]).parent
        try:
            reader = open_reader(directory, self.quantization_config.read_options())
        except NotQuantized:
            if names_no_layer(self.quantization_config.source):
                return  # all weights are floats, and transformers loads them
            raise
        self._packed = PackedCheckpoint(reader, self.quantization_config, has_parts)
        check_files(reader, (Path(file).name for file in checkpoint_files))

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Finds the modules of packed layers. Replaces some of transformers' conversions by `MergedOneByOne`."""
        self._conversions = weight_conversions
        if self._packed is not None:
            self._conversions = self._packed.place(model, weight_conversions, self.reinitializes)
        if self.float_experts is not None:
            self._conversions = [MergedOneByOne.instead_of(conversion) for conversion in self._conversions]
        return self._conversions

    def _choose(self, model: Any, checkpoint_files: list[str] | None = None) -> None:
        """Selects the layers to quantize, and raises errors for invalid arguments before any tensor is read."""
        config = self.quantization_config
        words = set().union(*vocabulary_of(model, config.vocabulary_format))
        kept = [] if config.quantize_head else self.get_modules_to_not_convert(model)
        staying = staying_layers(model, heads=not config.quantize_head)

        def stays(name: str) -> str:
            module = model.get_submodule(name)
            if reason := staying.get(id(module)):
                return f"{reason}, unless quantize_head=True" if reason == IN_HEAD else reason
            is_free = id(module) in words or should_convert_module(name, kept)
            return "" if is_free else "it is one of the last layers, unless quantize_head=True"

        ties = tied_modules(model.all_tied_weights_keys)
        samples = None if config.memory is None else samples_of(model, checkpoint_files, config.allow_pickle)
        chosen, self._recipe = choose_layers(OP, model, config, stays, ties, samples)
        experts = {name for name in chosen if is_experts(model.get_submodule(name))}
        self.float_experts = FloatExperts(OP, model, experts, self._packed_weight)
        self._chosen = {f"{name}.weight" for name in chosen if name not in experts} | self.float_experts.parameters()

    def quantize_empty(self, model: Any) -> None:
        """Replaces layers of a model on the meta device by the packed layers that loading floats would make."""
        self._choose(model)
        for name in sorted(self._chosen):
            self._quantize(model, name.removesuffix(".weight"), model.get_parameter(name))
        self._install(model)
        model.tie_weights()

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Returns True if a weight is quantized during loading.

        If transformers splits a tensor into several weights, it calls this method only for the first weight. The result
        is then True if any of these weights is quantized.
        """
        if self.pre_quantized:
            return False
        return any(name in self._chosen for name in (param_name, *siblings(param_name, self._conversions)))

    def get_quantize_ops(self) -> "QuantizeWhileLoading":
        """Returns the operation that transformers applies to each weight that is quantized."""
        return QuantizeWhileLoading(self._quantize, self._chosen)

    def _quantize(self, model: Any, name: str, weight: Tensor) -> bool:
        """Quantizes the weight of a Linear or of stacked experts. Stores an error, and `_install` raises it.

        The packed layer replaces the Linear only after all tensors are loaded. Until then, the Linear has an empty
        weight, which some models read when they initialize missing tensors.
        """
        if self._failure is not None:
            return False
        try:
            if self.float_experts is not None and name in self.float_experts.parameters():
                self.float_experts.pack(model, name, weight)
                return True
            linear = model.get_submodule(name)
            packed = self._packed_weight(name, weight.T.contiguous() if is_transposed(linear) else weight)
        except ValueError as error:
            self._failure = error
            return False
        self._made[name] = packed, weight.dtype
        # A Linear's empty weight keeps its last dimension, because some models divide by it when they initialize a
        # weight. An embedding's weight keeps its shape, because transformers reads the number of rows from it for a
        # layer that is tied to the embedding.
        empty = weight.new_empty(0, weight.shape[1])
        if isinstance(linear, nn.Embedding):
            empty = weight.new_zeros(1).expand(weight.shape)
        linear.weight = nn.Parameter(empty, requires_grad=False)
        initialized(linear.weight)
        return True

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        # With True, transformers refuses .half() and .float(), although they convert only the bias of a packed layer.
        model.is_quantized = False
        self._install(model)
        if self.quantization_config.fuse:
            fuse_projections(model)
        if self.quantization_config.fuse == "layers":
            for name, reason in fuse_layers(model).left:
                logger.info(f"fuse_layers: {name}: {reason}")
        exporter = NativeExporter()
        if split_of(OP, model) is None:  # a process's parts of a split model are never saved
            for name, weight in stored_layers(model, copy=False):
                exporter.describe(weight, name)
        self.quantization_config.layers = exporter.layers
        if self.quantization_config.prepare:
            prepare(model, progress=logging.is_progress_bar_enabled())
        self.forget_floats(model)
        return model

    def _install(self, model: Any) -> None:
        """Puts the packed layers into the model, or raises the error of a weight that could not be quantized."""
        if self._failure is not None:
            raise self._failure
        if self._packed is not None:
            self._packed.fill(model, self._device_map)
            self._packed = None
        self._place_made(model)
        if self.float_experts is not None:
            self.float_experts.install(model)
            self.float_experts = None

    def forget_floats(self, model: Any) -> None:
        """Removes the quantizer of a model without packed layers, so that its directory loads without this package."""
        if not any(isinstance(module, PackedLayer) for module in model.modules()):
            logger.info(f"{OP}: {type(model).__name__}: no layer is packed, the model is one of floats")
            self.remove_quantization_config(model)

    def _place_made(self, model: Any) -> None:
        """Puts the quantized layers into the model. Modules whose weights are tied share one layer's tensors."""
        users: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, module in model.named_modules():
            if module._parameters.get("weight") is not None:
                users.setdefault(id(module.weight), []).append((name, module))
        for name, (packed, dtype) in self._made.items():
            for user, module in users.get(id(model.get_submodule(name)._parameters.get("weight")), ()):
                mine, _ = self._made.get(user, (packed, dtype))
                layer = packed_layer(module, packed if same_values(mine, packed) else mine, dtype)
                inherit(layer, module)
                model.set_submodule(user, layer)
        self._made.clear()

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns the tensors for `save_pretrained`, and updates the settings.

        Fused layers are split into the original layers, so a saved model does not depend on `fuse`.
        """
        packed, exporter = dict(stored_layers(model)), NativeExporter()
        everywhere = [name for name, _ in unfused(model)]
        stacks = [name for name, module in model.named_modules() if isinstance(module, NamedExperts)]
        inside = tuple(f"{name}." for name in (*everywhere, *stacks))
        state = {name: value for name, value in model.state_dict().items() if not name.startswith(inside)}
        for name in stacks:
            state |= {f"{name}.{inner}": tensor for inner, tensor in model.get_submodule(name).named_floats()}
        for name in everywhere:
            if name not in packed and (bias := model.get_submodule(name).bias) is not None:
                state[f"{name}.bias"] = bias.detach()
        renamed = not rearranges(model, packed)
        for name, weight in packed.items():
            stored = f"{name}.b_packed"
            if renamed:
                (stored,) = revert_weight_conversion(model, {stored: weight.b_packed})
            tensors = exporter.own_tensors(weight, stored.removesuffix(".b_packed"))
            state |= {f"{name}.{key}": value for key, value in tensors.items()}
        self.quantization_config.layers = exporter.layers
        model.config.quantization_config = self.quantization_config
        return state, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        original = empty_model(model)
        floats = _dtype(dtype) or torch.float32
        decode_stacks(model, floats)
        weights: dict[tuple[int, int], nn.Parameter] = {}  # one decoded weight for layers with the same tensors
        biases: dict[nn.Parameter, nn.Parameter] = {}  # other modules may use the same bias tensor
        for name, packed in list(unfused(model)):
            key = (id(packed.b_packed), id(packed.scales))
            held = model.get_submodule(name)
            new = float_module(held, find_module(original, name), packed, floats, weights.get(key))
            assert isinstance(new.weight, nn.Parameter)
            weights[key] = new.weight
            if (bias := held._parameters.get("bias")) is not None:
                biases[bias] = new._parameters["bias"] = biases.get(bias, new.get_parameter("bias"))
            model.set_submodule(name, new)
        for module in model.modules():
            module._parameters |= {key: biases[held] for key, held in module._parameters.items() if held in biases}
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Returns True: `save_pretrained` writes this package's format (docs/formats/formats.md)."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Returns True: packed weights are constant, but `gemm` propagates gradients, so adapters can be trained."""
        return True


def _dtype(stated: torch.dtype | str | None) -> torch.dtype | None:
    """Converts the dtype of a caller or a config. `save_pretrained` turns the config's dtype into a string."""
    if not isinstance(stated, str):
        return stated
    found = getattr(torch, stated.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dequantize: dtype: expected a dtype of torch or its name, got {stated!r}")
    return found
