"""transformers' `HfQuantizer` for this package: loads packed checkpoints, quantizes float checkpoints, and saves.

A packed checkpoint is loaded in two steps. Before transformers loads, a `PendingLinear` replaces every Linear that the
checkpoint holds in 4 bit. This placeholder has no tensors, so transformers does not miss a weight and does not make
one. When transformers has loaded everything else, the packed layers replace the placeholders, one at a time.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.core_model_loading import (
    ConversionOps,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.quantizers import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.formats.native import NativeExporter
from torch_marlin_metal.checkpoints.reader import CheckpointReader, DirectorySource, open_reader
from torch_marlin_metal.integrations.choice import choose_layers
from torch_marlin_metal.integrations.transformers.config import MarlinConfig
from torch_marlin_metal.integrations.transformers.experts import make_room
from torch_marlin_metal.integrations.transformers.names import rearranges
from torch_marlin_metal.integrations.transformers.pending import (
    PendingLinear,
    check_devices,
    device_of,
    ignored_patterns,
    inherit,
    initialized,
    make_layer,
    matcher,
)
from torch_marlin_metal.layers.fuse import fuse_projections, unfused
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models.empty_model import LinearShape, is_transposed, linear_shape, listing
from torch_marlin_metal.models.prepare import prepare
from torch_marlin_metal.models.taken import taken_weights
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.patterns import check_patterns, selects
from torch_marlin_metal.quantize.weight import quantize_weight

OP = "from_pretrained"
logger = logging.get_logger(__name__)


class MarlinQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts `MarlinLinear` layers into transformers models; `from_pretrained` creates and calls it."""

    requires_calibration = False
    quantization_config: MarlinConfig

    def __init__(self, quantization_config: MarlinConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._reader: CheckpointReader | None = None
        self._pending: dict[str, tuple[int, PendingLinear]] = {}
        self._device_map: dict[str, Any] | None = None
        self._tensors: set[str] = set()
        self._decoded: set[str] = set()
        self._chosen: set[str] = set()
        self._made: dict[str, tuple[PackedWeight, torch.dtype]] = {}
        self._failure: Exception | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuses devices that have no kernels."""
        if isinstance(device_map, dict):
            check_devices(OP, device_map)

    def update_device_map(self, device_map: Any) -> Any:
        """Replaces "auto" and its variants by mps if the machine has it, else by the CPU."""
        if isinstance(device_map, str):
            return {"": torch.device("mps" if torch.backends.mps.is_available() else "cpu")}
        return device_map

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self._device_map = device_map
        if self.pre_quantized:
            self._open(checkpoint_files)
        else:
            self._choose(model)

    def _open(self, checkpoint_files: list[str] | None) -> None:
        """Opens the directory that transformers found."""
        if not checkpoint_files:
            raise CheckpointError(f"{OP}: a 4-bit checkpoint is read from files; got a state_dict")
        directory = Path(checkpoint_files[0]).parent
        self._reader = open_reader(directory, on_unsupported=self.quantization_config.on_unsupported)
        assert isinstance(self._reader.source, DirectorySource)
        self._tensors = set(self._reader.source.checkpoint.tensors)
        files = {info.file.name for info in self._reader.source.checkpoint.tensors.values()}
        asked = {Path(file).name for file in checkpoint_files}
        if files != asked:
            raise CheckpointError(
                f"{directory}: transformers asks for {listing(asked)}, the checkpoint's tensors are in {listing(files)}"
            )

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Returns transformers' conversions unchanged, and uses their renaming to find each packed layer's module."""
        if self._reader is not None and not self._pending:
            self._plan(model, self._reader, weight_conversions)
        return weight_conversions

    def _plan(self, model: Any, reader: CheckpointReader, conversions: list[Any]) -> None:
        renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        state = model.state_dict()
        unused = matcher(model._keys_to_ignore_on_load_unexpected or ())
        for index, source in enumerate(reader.layer_names):
            key, _ = rename_source_key(f"{source}.weight", renamings, [], model.base_model_prefix, state)
            name = self._place(model, key.removesuffix(".weight"))
            if not _has(model, name) and _has(model, source):
                name = source  # saved under the model's own names
            known = _has(model, name)
            if name in self._decoded or (unused(key) and not known) or not hasattr(model, name.split(".")[0]):
                continue  # this model class has no such head; transformers reports it
            try:
                module = model.get_submodule(name)
            except AttributeError as error:
                raise UnsupportedFormat(
                    f"{reader.path}: layer {source!r}: {type(model).__name__} has no layer {name!r}"
                ) from error
            if isinstance(module, PendingLinear):  # the placeholder of an expert
                self._pending[name] = index, module
                continue
            shape = linear_shape(module)
            if shape is None:
                raise UnsupportedFormat(
                    f"{reader.path}: layer {source!r}: expected nn.Linear in the model for a 4-bit layer, "
                    f"got {type(module).__name__}"
                    + (" (load_quantized keeps embeddings in 4 bit)" if isinstance(module, nn.Embedding) else "")
                )
            pending = PendingLinear(shape)
            inherit(pending, module)
            model.set_submodule(name, pending)
            self._pending[name] = index, pending
            model.all_tied_weights_keys.pop(f"{name}.weight", None)
        dense = {name for name, _, _ in reader.source.others()}
        model._keys_to_ignore_on_load_unexpected |= ignored_patterns(self._tensors - dense)

    def _place(self, model: Any, name: str) -> str:
        """Returns a layer's name in this model class. For an expert, it first adds the placeholders to the model."""
        prefix = f"{model.base_model_prefix}."
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if make_room(model, candidate) or _has(model, candidate):
                return candidate
        return name

    def _choose(self, model: Any) -> None:
        """Finds the layers to quantize, and refuses wrong arguments before anything is read."""
        config = self.quantization_config
        kept = [] if config.quantize_head else self.get_modules_to_not_convert(model)

        def stays(name: str) -> str:
            return "" if should_convert_module(name, kept) else "the output layer, unless quantize_head=True"

        self._chosen = {f"{name}.weight" for name in choose_layers(OP, model, config, stays)}

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Returns whether a weight is quantized while it is loaded."""
        return not self.pre_quantized and param_name in self._chosen

    def get_quantize_ops(self) -> "QuantizeWhileLoading":
        """Returns the operation that transformers applies to each weight to quantize."""
        return QuantizeWhileLoading(self._quantize, self._chosen)

    def _quantize(self, model: Any, name: str, weight: Tensor) -> bool:
        """Quantizes the weight of a Linear. Stores an error, which is raised at the end of the load.

        The packed layer enters the model only when everything is loaded. Until then the Linear keeps an empty weight,
        because models initialize tensors that they miss, and some do this with tensors of their children.
        """
        config = self.quantization_config
        if self._failure is not None:
            return False
        linear = model.get_submodule(name)
        matrix = weight.T.contiguous() if is_transposed(linear) else weight
        try:
            packed = quantize_weight(
                matrix, config.weight_format, config.group_size, config.method, **config.quantize_options
            )
        except ValueError as error:
            self._failure = ValueError(f"{OP}: layer {name!r}: {error}")
            return False
        self._made[name] = packed, weight.dtype
        # The last dimension keeps its size, because some models divide by it when they initialize.
        linear.weight = nn.Parameter(weight.new_empty(0, weight.shape[1]), requires_grad=False)
        initialized(linear.weight)
        return True

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        # If true, transformers would refuse .half() and .float(), which convert the bias of packed layers.
        model.is_quantized = False
        if self._reader is not None:
            self._fill(model, self._reader)
            self._reader = None
        for name, (packed, dtype) in self._made.items():
            linear = model.get_submodule(name)
            layer = MarlinLinear.from_packed(replace(packed, bias=linear.bias), dtype=dtype)
            inherit(layer, linear)
            model.set_submodule(name, layer)
        self._made.clear()
        if self.quantization_config.fuse:
            fuse_projections(model)
        exporter = NativeExporter()
        for name, weight in unfused(model):
            exporter.tensors(replace(weight, name=name))
        self.quantization_config.layers = exporter.layers
        if self.quantization_config.prepare:
            prepare(model)
        return model

    def _fill(self, model: Any, reader: CheckpointReader) -> None:
        keep_dense = self.quantization_config.modules_to_not_convert
        check_patterns(OP, self._pending, modules_to_not_convert=keep_dense)
        taken = taken_weights(model)
        for name, (index, pending) in tqdm(self._pending.items(), desc="Loading 4-bit layers", unit="layer"):
            weight = reader.read(index)
            assert weight is not None  # on_unsupported is not "skip"
            dense = selects(keep_dense, name) or id(pending) in taken
            if id(pending) in taken:
                logger.warning(f"{name} is decoded to floats: {taken[id(pending)]}")
            layer = make_layer(OP, name, pending.shape, weight, device_of(self._device_map, name), dense)
            inherit(layer, pending)
            model.set_submodule(name, layer)
        self._pending.clear()

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns the tensors for `save_pretrained`, and updates the settings.

        Fused layers are split again, so a saved model does not depend on `fuse`.
        """
        packed, exporter = dict(unfused(model)), NativeExporter()
        inside = tuple(f"{name}." for name in packed)
        state = {name: value for name, value in model.state_dict().items() if not name.startswith(inside)}
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

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        with torch.device("meta"):
            original = type(model)._from_config(model.config)  # knows which layers hold their weight transposed
        for name, packed in list(unfused(model)):
            bias, transposed = packed.bias, _has(original, name) and is_transposed(original.get_submodule(name))
            device = packed.b_packed.device
            shape = LinearShape(packed.N, packed.K, dtype or torch.float32, device, bias, transposed)
            layer = make_layer(OP, name, shape, packed, shape.device, True)
            inherit(layer, model.get_submodule(name))
            model.set_submodule(name, layer)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Returns True: `save_pretrained` writes this package's format (docs/on-disk-format.md)."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Returns True: weights are constant, but adapters can be trained, because `gemm` passes gradients through."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Returns True, so that `generate` may compile its decoding step with a static cache."""
        return True


def _has(model: Any, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


class QuantizeWhileLoading(ConversionOps):  # type: ignore[misc]
    """A transformers conversion that turns weights into 4-bit layers of the model instead of parameters."""

    def __init__(self, quantize: Callable[[Any, str, Tensor], bool], chosen: set[str]) -> None:
        self._quantize = quantize
        self._chosen = chosen

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str,
        model: Any,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Quantizes the chosen weights and returns the other tensors, which transformers makes parameters.

        `input_dict` has several weights if transformers has split one tensor of the checkpoint, such as a joint q, k
        and v.
        """
        named = input_dict if len(input_dict) > 1 else dict.fromkeys([full_layer_name], *input_dict.values())
        others = {}
        for name, tensors in named.items():
            weight = tensors[0] if isinstance(tensors, list) else tensors
            if name not in self._chosen:
                others[name] = weight
            elif self._quantize(model, name.removesuffix(".weight"), weight) and missing_keys is not None:
                missing_keys.discard(name)
        return others
