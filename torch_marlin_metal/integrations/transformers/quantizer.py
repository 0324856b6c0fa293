"""transformers' `HfQuantizer` for this package: loads packed checkpoints, quantizes float checkpoints, and saves.

A packed checkpoint is loaded in two steps. Before transformers loads, a `PendingLinear` replaces every Linear that the
checkpoint holds in 4 bit. This placeholder has no tensors, so transformers does not miss a weight and does not make
one. When transformers has loaded everything else, the packed layers replace the placeholders, one at a time.
Embeddings wait without their weight, and so do the layers that are tied to them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.core_model_loading import (
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
from torch_marlin_metal.extension import require
from torch_marlin_metal.fuse.layers import fuse_layers
from torch_marlin_metal.integrations.choice import choose_layers
from torch_marlin_metal.integrations.transformers.config import MarlinConfig
from torch_marlin_metal.integrations.transformers.experts import decode_stacks, make_room, stack_experts
from torch_marlin_metal.integrations.transformers.names import loaded_names, rearranges, siblings, tied_modules
from torch_marlin_metal.integrations.transformers.parallel import check_sizes, split_of
from torch_marlin_metal.integrations.transformers.pending import (
    PendingLinear,
    check_devices,
    device_of,
    float_layer,
    hollow_out,
    ignored_patterns,
    inherit,
    initialized,
    make_layer,
    make_table,
    matcher,
    share_weight,
)
from torch_marlin_metal.integrations.transformers.stored import empty_model, stored_layers
from torch_marlin_metal.integrations.transformers.while_loading import QuantizeWhileLoading
from torch_marlin_metal.layers.embedding import MarlinEmbedding, why_not_embedding
from torch_marlin_metal.layers.experts import StackError
from torch_marlin_metal.layers.fuse import fuse_projections, unfused
from torch_marlin_metal.models.empty_model import (
    LinearShape,
    fit_layer,
    is_linear,
    is_transposed,
    linear_shape,
    listing,
    packed_layer,
)
from torch_marlin_metal.models.experts import NamedExperts
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
        self._chosen: set[str] = set()
        self._conversions: list[Any] = []
        self._tables: dict[str, tuple[int, nn.Embedding]] = {}
        self._tied: dict[str, str] = {}
        self._made: dict[str, tuple[PackedWeight, torch.dtype]] = {}
        self._failure: Exception | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuses devices that have no kernels, and every device without the compiled extension."""
        require(OP)
        if isinstance(device_map, dict):
            check_devices(OP, device_map)

    def update_device_map(self, device_map: Any) -> Any:
        """Replaces "auto" and its variants by mps if the machine has it, else by the CPU."""
        if isinstance(device_map, str):
            return {"": torch.device("mps" if torch.backends.mps.is_available() else "cpu")}
        return device_map

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Leaves a plan as it is: its rules name modules, which packed layers have like float ones; see `_fill`."""

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self._device_map = device_map
        check_sizes(OP, model, self.pre_quantized)
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
        self._conversions = weight_conversions
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
            if (unused(key) and not known) or not hasattr(model, name.split(".")[0]):
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
            if isinstance(module, nn.Embedding):
                self._check_table(f"{reader.path}: layer {source!r}", module)
                hollow_out(module)
                self._tables[name] = index, module
                continue
            shape = linear_shape(module)
            if shape is None:
                raise UnsupportedFormat(
                    f"{reader.path}: layer {source!r}: expected nn.Linear in the model for a 4-bit layer, "
                    f"got {type(module).__name__}"
                )
            pending = PendingLinear(shape)
            inherit(pending, module)
            model.set_submodule(name, pending)
            self._pending[name] = index, pending
            model.all_tied_weights_keys.pop(f"{name}.bias", None)  # the checkpoint's layer has its bias
        unfilled = [n for n, m in model.named_modules() if isinstance(m, PendingLinear) and n not in self._pending]
        if unfilled:
            raise CheckpointError(
                f"{reader.path}: expected every expert of a mixture in 4 bit or none, got no packed weight for "
                f"{listing(unfilled)}"
            )
        dense = {name for name, _, _ in reader.source.others()}
        packed = self._tensors - dense
        model._keys_to_ignore_on_load_unexpected |= ignored_patterns(packed | loaded_names(packed, conversions))
        stored = (
            rename_source_key(name, renamings, [], model.base_model_prefix, state)[0]
            for name in dense
            if name.endswith(".weight")
        )
        self._tie(model, {name.removesuffix(".weight") for name in stored})

    def _check_table(self, where: str, module: nn.Embedding) -> None:
        reason = why_not_embedding(module)
        if reason and self.quantization_config.on_unsupported == "error":
            raise UnsupportedFormat(
                f"{where}: the checkpoint stores this embedding in 4 bit, but {reason}; "
                "MarlinConfig(on_unsupported='dequantize') decodes it to floats"
            )

    def _tie(self, model: Any, dense: set[str]) -> None:
        """Finds the modules that share the weight of a packed layer and that the checkpoint lacks.

        transformers does not see these ties any more: it would look for tensors that packed layers do not have.
        """
        packed = self._pending.keys() | self._tables.keys()
        groups: dict[str, list[str]] = {}
        for name, source in tied_modules(model.all_tied_weights_keys).items():
            groups.setdefault(source, [source]).append(name)
        for source, names in groups.items():
            held = [name for name in names if name in packed]
            if not held:
                continue
            stays = source in dense and source not in packed  # transformers ties the others to it
            for name in names:
                if name != source and (name in packed or not stays):
                    del model.all_tied_weights_keys[f"{name}.weight"]
                if name not in packed | dense and not stays:
                    hollow_out(model.get_submodule(name))
                    self._tied[name] = held[0]

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

        chosen = choose_layers(OP, model, config, stays, tied_modules(model.all_tied_weights_keys))
        self._chosen = {f"{name}.weight" for name in chosen}

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Returns whether a weight, or one that transformers splits off the same tensor, is quantized while loading.

        transformers asks for the first one alone.
        """
        if self.pre_quantized:
            return False
        return any(name in self._chosen for name in (param_name, *siblings(param_name, self._conversions)))

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
        # Some models divide by the size of the last dimension when they initialize. Of an embedding transformers takes
        # the number of rows for a tied layer.
        empty = weight.new_empty(0, weight.shape[1])
        if isinstance(linear, nn.Embedding):
            empty = weight.new_zeros(1).expand(weight.shape)
        linear.weight = nn.Parameter(empty, requires_grad=False)
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
        self._place_made(model)
        if self.quantization_config.fuse:
            fuse_projections(model)
        if self.quantization_config.fuse == "layers":
            for name, reason in fuse_layers(model).left:
                logger.info(f"fuse_layers: {name}: {reason}")
        exporter = NativeExporter()
        if split_of(OP, model) is None:  # parts are never saved
            for name, weight in stored_layers(model):
                exporter.tensors(replace(weight, name=name))
        self.quantization_config.layers = exporter.layers
        if self.quantization_config.prepare:
            prepare(model)
        return model

    def _place_made(self, model: Any) -> None:
        """Puts the layers that were quantized while loading into the model, and shares them where weights are tied."""
        users: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, module in model.named_modules():
            if module._parameters.get("weight") is not None:
                users.setdefault(id(module.weight), []).append((name, module))
        for name, (packed, dtype) in self._made.items():
            for user, module in users.get(id(model.get_submodule(name)._parameters.get("weight")), ()):
                mine, _ = self._made.get(user, (packed, dtype))
                one, two = (
                    {key: tensor for key, tensor in weight.tensors().items() if key != "bias"}
                    for weight in (mine, packed)
                )
                same = one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
                layer = packed_layer(module, packed if same else mine, dtype)
                inherit(layer, module)
                model.set_submodule(user, layer)
        self._made.clear()

    def _fill(self, model: Any, reader: CheckpointReader) -> None:
        keep_dense = self.quantization_config.modules_to_not_convert
        check_patterns(OP, [*self._tables, *self._pending], modules_to_not_convert=keep_dense)
        users: dict[str, list[str]] = {}
        for user, source in self._tied.items():
            users.setdefault(source, []).append(user)
        taken = taken_weights(model)
        split, styles = split_of(OP, model), {}
        if split is not None:
            floats = [n for n in self._pending if selects(keep_dense, n) or self._why_dense(model, n, taken)]
            whole = {*self._tables, *self._tied, *floats}
            styles = split.styles([(n, m) for n, (_, m) in self._pending.items() if n not in whole], whole)
            split.begin(reader)
            for name in (*self._tables, *self._tied):  # hooks of the style "replicate", which do nothing
                model.get_submodule(name).__dict__.pop("forward", None)
        self._fill_stacks(model, reader)
        places: dict[str, tuple[int, nn.Module]] = {**self._tables, **self._pending}
        for name, (index, place) in tqdm(places.items(), desc="Loading 4-bit layers", unit="layer"):
            if split is not None and name in styles and isinstance(place, PendingLinear):
                device = device_of(self._device_map, name)
                part = split.load(name, styles[name], place.shape, reader, index, device)
                inherit(part, place)
                model.set_submodule(name, part)
                continue
            weight = reader.read(index)
            assert weight is not None  # on_unsupported is not "skip"
            names = [name, *users.get(name, ())]
            why = next((reason for user in names if (reason := self._why_dense(model, user, taken))), "")
            if why:
                logger.warning(f"{name} is decoded to floats: {why}")
            dense = bool(why) or any(selects(keep_dense, user) for user in names)
            device = device_of(self._device_map, name)
            if isinstance(place, PendingLinear):
                layer = make_layer(OP, name, place.shape, weight, device, dense)
                inherit(layer, place)
            else:
                assert isinstance(place, nn.Embedding)
                layer = make_table(OP, name, place, weight, device, dense)
            model.set_submodule(name, layer)
            for user in users.get(name, ()):
                share_weight(model, user, layer)
        self._pending.clear()
        self._tables.clear()
        self._tied.clear()

    def _fill_stacks(self, model: Any, reader: CheckpointReader) -> None:
        """Reads the experts of mixtures into stacks. The layers of experts that stay separate are still pending."""

        def read(name: str, shape: LinearShape) -> PackedWeight:
            index, _ = self._pending[name]
            if selects(self.quantization_config.modules_to_not_convert, name):
                raise StackError(f"{name} stays in floats")
            weight = reader.read(index)
            if not isinstance(weight, PackedWeight):
                raise StackError(f"{name} has no 4-bit weight that the operators take")
            return fit_layer(OP, name, shape, weight, device=device_of(self._device_map, name)).to_packed()

        done, left = stack_experts(model, read)
        for name, reason in left.items():
            logger.warning(f"{name} runs one expert after the other: {reason}")
        for name in done:
            del self._pending[name]

    def _why_dense(self, model: Any, name: str, taken: dict[int, str]) -> str:
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            return taken.get(id(module)) or why_not_embedding(module)
        fits = isinstance(module, PendingLinear) or is_linear(module)
        return taken.get(id(module)) or ("" if fits else f"{type(module).__name__} shares its weight")

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns the tensors for `save_pretrained`, and updates the settings.

        Fused layers are split again, so a saved model does not depend on `fuse`.
        """
        packed, exporter = dict(stored_layers(model)), NativeExporter()
        everywhere = [name for name, _ in unfused(model)]
        stacks = [name for name, module in model.named_modules() if isinstance(module, NamedExperts)]
        inside = tuple(f"{name}." for name in (*everywhere, *stacks))
        state = {name: value for name, value in model.state_dict().items() if not name.startswith(inside)}
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

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        original = empty_model(model)  # knows which layers hold their weight transposed
        decode_stacks(model, dtype or torch.float32)
        weights: dict[tuple[int, int, bool], nn.Parameter] = {}  # layers that share words share the decoded weight
        for name, packed in list(unfused(model)):
            old, device = model.get_submodule(name), packed.b_packed.device
            transposed = _has(original, name) and is_transposed(original.get_submodule(name))
            key = (id(packed.b_packed), id(packed.scales), transposed)
            layer: nn.Module
            if isinstance(old, MarlinEmbedding):
                layer = nn.Embedding(packed.N, packed.K, old.padding_idx, device="meta")
                if key not in weights:
                    layer = make_table(OP, name, layer, packed, device, True, dtype)
            else:
                shape = LinearShape(packed.N, packed.K, dtype or torch.float32, device, packed.bias, transposed)
                if key in weights:
                    layer = float_layer(OP, name, shape, weights[key], packed.bias)
                else:
                    layer = make_layer(OP, name, shape, packed, device, True)
            assert isinstance(layer.weight, nn.Parameter)
            layer.weight = weights.setdefault(key, layer.weight)
            inherit(layer, old)
            model.set_submodule(name, layer)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Returns True: `save_pretrained` writes this package's format (docs/formats/on-disk-format.md)."""
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
