"""Puts the packed layers of a checkpoint into a model while transformers loads everything else.

Before transformers loads, a `PendingLinear` replaces every Linear that the checkpoint holds in 4 bit. The placeholder
has no tensors, so transformers neither reports a missing weight nor makes one. When transformers has loaded everything
else, the packed layers replace the placeholders, one at a time. Packed embeddings, and layers that are tied to them,
get no placeholder: they stay in the model, but without a weight, until then.
"""

import re
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers.utils import logging

from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.safetensors import keep_file_open
from torch_marlin_metal.checkpoints.model_names import ModelNames
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.integrations.transformers.config import MarlinConfig
from torch_marlin_metal.integrations.transformers.experts import SeparateExperts, make_room
from torch_marlin_metal.integrations.transformers.names import loaded_names, tied_modules
from torch_marlin_metal.integrations.transformers.parallel import split_of
from torch_marlin_metal.integrations.transformers.pending import (
    PendingLinear,
    device_of,
    hollow_out,
    ignored_patterns,
    inherit,
    make_layer,
    make_table,
    matcher,
    share_weight,
)
from torch_marlin_metal.layers.embedding import why_not_embedding
from torch_marlin_metal.layers.experts import StackError
from torch_marlin_metal.layers.float_experts import find_module
from torch_marlin_metal.models.empty_model import LinearShape, fit_weight, is_linear, linear_shape, listing
from torch_marlin_metal.models.taken import taken_weights
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.patterns import check_patterns, selects

OP = "from_pretrained"
EXPERT = re.compile(r"\.experts\.\d+\.")
AHEAD_BYTES = 1 << 28  # that are read ahead of tensors that become part of the model
COPIED_AHEAD_BYTES = 1 << 25  # the same of tensors that are copied into it, which exist twice for a while
logger = logging.get_logger(__name__)


class PackedCheckpoint:
    """A checkpoint with packed layers that `from_pretrained` loads.

    Args:
        reader: reads the packed layers.
        config: the settings of the load.
    """

    def __init__(self, reader: CheckpointReader, config: MarlinConfig) -> None:
        self.reader = reader
        self._config = config
        self._pending: dict[str, tuple[int, PendingLinear]] = {}
        self._experts: dict[str, tuple[SeparateExperts, dict[str, int]]] = {}  # with each layer's index in the reader
        self._tables: dict[str, tuple[int, nn.Embedding]] = {}
        self._tied: dict[str, str] = {}

    def read_ahead(self, device_map: dict[str, Any] | None) -> None:
        """Starts to read the layers in threads, in the order of `fill`, while transformers prepares the model."""
        names = self.reader.layer_names
        others = [index for index, name in enumerate(names) if not EXPERT.search(name)]
        experts = sorted(set(range(len(names))) - set(others))
        moves = any(torch.device(place).type != "cpu" for place in (device_map or {}).values())
        self.reader.read_ahead(experts + others, COPIED_AHEAD_BYTES if experts or moves else AHEAD_BYTES)

    def stop_reading_ahead(self) -> None:
        """Ends the threads and frees what they read for nothing."""
        self.reader.stop_reading_ahead()

    def _tensors(self) -> set[str]:
        """Returns the names of all tensors of a checkpoint directory. Of a GGUF file transformers asks for none."""
        return set(self.reader.tensor_files())

    def place(self, model: Any, conversions: list[Any]) -> None:
        """Replaces the modules of packed layers by placeholders. A second call does nothing.

        Args:
            model: changed in place.
            conversions: transformers' changes of names between the checkpoint and the model.

        Raises:
            CheckpointError: the model has no layer for a packed weight, or a mixture is packed only in part.
        """
        if self._pending or self._experts:
            return
        reader = self.reader
        names = ModelNames(model, conversions)
        unused = matcher(model._keys_to_ignore_on_load_unexpected or ())
        for index, source in enumerate(reader.layer_names):
            name = names.layer(source)
            if selects(self._config.ignore, name) or selects(self._config.ignore, source):
                continue
            if (found := names.experts.find(name)) and self._place_expert(model, index, name, *found):
                continue
            module = find_module(model, name)
            if (unused(names.tensor(f"{source}.weight")) and module is None) or not hasattr(model, name.split(".")[0]):
                continue  # this model class has no such head; transformers reports it
            if module is None:
                raise UnsupportedFormat(
                    f"{reader.path}: layer {source!r}: {type(model).__name__} has no layer {name!r}"
                )
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
        unfilled = [
            f"{prefix}.{inner}"
            for prefix, (experts, indexes) in self._experts.items()
            for inner in experts.shapes.keys() - indexes
        ]
        if unfilled:
            raise CheckpointError(
                f"{reader.path}: expected every expert of a mixture in 4 bit or none, got no packed weight for "
                f"{listing(unfilled)}"
            )
        dense = {name for name, _, _ in reader.others()}
        packed = {EXPERT.sub(".experts.0.", name) for name in self._tensors() - dense}  # patterns take any number
        model._keys_to_ignore_on_load_unexpected |= ignored_patterns(packed | loaded_names(packed, conversions))
        self._tie(model, {names.tensor(name).removesuffix(".weight") for name in dense if name.endswith(".weight")})

    def _place_expert(self, model: Any, index: int, name: str, prefix: str, parts: tuple[str, ...]) -> bool:
        """Notes the layer of an expert, and replaces its experts module. Returns False if it has no such layer."""
        if prefix not in self._experts:
            experts = make_room(model, prefix, parts)
            if experts.why_unknown:
                raise UnsupportedFormat(f"{self.reader.path}: experts {prefix!r}: {experts.why_unknown}")
            self._experts[prefix] = experts, {}
        experts, indexes = self._experts[prefix]
        inner = name.removeprefix(f"{prefix}.")
        if inner in experts.shapes:
            indexes[inner] = index
        return inner in experts.shapes

    def fill(self, model: Any, device_map: dict[str, Any] | None) -> None:
        """Reads the packed layers, one at a time, and puts each in the place of its placeholder."""
        reader = self.reader
        keep_dense = self._config.modules_to_not_convert
        inside = {
            f"{prefix}.{inner}": shape
            for prefix, (experts, _) in self._experts.items()
            for inner, shape in experts.shapes.items()
        }
        check_patterns(OP, [*self._tables, *self._pending, *inside], modules_to_not_convert=keep_dense)
        users: dict[str, list[str]] = {}
        for user, source in self._tied.items():
            users.setdefault(source, []).append(user)
        taken = taken_weights(model)
        split, styles = split_of(OP, model), {}
        if split is not None:
            floats = [n for n in self._pending if selects(keep_dense, n) or _why_dense(model, n, taken)]
            whole = {*self._tables, *self._tied, *floats, *(n for n in inside if selects(keep_dense, n))}
            places = {n: m for n, (_, m) in self._pending.items()} | {n: PendingLinear(s) for n, s in inside.items()}
            styles = split.styles([(n, m) for n, m in places.items() if n not in whole], whole)
            split.begin(reader)
            for name in (*self._tables, *self._tied):  # hooks of the style "replicate", which do nothing
                model.get_submodule(name).__dict__.pop("forward", None)
        used = {index for index, _ in (*self._tables.values(), *self._pending.values())}
        used |= {index for _, indexes in self._experts.values() for index in indexes.values()}
        reader.leave_out(set(range(len(reader))) - used)
        with keep_file_open():
            self._fill_stacks(model, device_map)
        waiting: dict[str, tuple[int, nn.Module]] = {**self._tables, **self._pending}
        in_order = sorted(waiting.items(), key=lambda item: item[1][0])
        for name, (index, place) in tqdm(in_order, desc="Loading 4-bit layers", unit="layer"):
            if split is not None and name in styles and isinstance(place, PendingLinear):
                device = device_of(device_map, name)
                part = split.load(name, styles[name], place.shape, reader, index, device)
                inherit(part, place)
                model.set_submodule(name, part)
                continue
            weight = reader.read(index)
            assert weight is not None  # on_unsupported is not "skip"
            names = [name, *users.get(name, ())]
            why = next((reason for user in names if (reason := _why_dense(model, user, taken))), "")
            if why:
                logger.warning(f"{name} is decoded to floats: {why}")
            dense = bool(why) or any(selects(keep_dense, user) for user in names)
            device = device_of(device_map, name)
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
        self._experts.clear()
        self._tables.clear()
        self._tied.clear()

    def _check_table(self, where: str, module: nn.Embedding) -> None:
        reason = why_not_embedding(module)
        if reason and self.reader.options.on_unsupported == "error":
            raise UnsupportedFormat(
                f"{where}: the checkpoint stores this embedding in 4 bit, but {reason}; "
                "MarlinConfig(on_unsupported='dequantize') decodes it to floats"
            )

    def _tie(self, model: Any, dense: set[str]) -> None:
        """Finds the modules that share the weight of a packed layer and that the checkpoint lacks.

        transformers itself cannot find them, because it looks for tensors that packed layers do not have.
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

    def _fill_stacks(self, model: Any, device_map: dict[str, Any] | None) -> None:
        """Reads the experts of mixtures into stacks. The layers of experts that cannot be stacked become pending ones.

        Weights are copied into the stack as they are read, so that only those of one expert exist beside it.
        """

        def read(prefix: str, indexes: dict[str, int], inner: str, shape: LinearShape) -> PackedWeight:
            name = f"{prefix}.{inner}"
            if selects(self._config.modules_to_not_convert, name):
                raise StackError(f"{name} stays in floats")
            weight = self.reader.read(indexes[inner])
            if not isinstance(weight, PackedWeight):
                raise StackError(f"{name} has no 4-bit weight that the operators take")
            return fit_weight(OP, name, shape, weight, device=device_of(device_map, name))

        for prefix, (experts, indexes) in self._experts.items():
            try:
                stack = experts.stacked(partial(read, prefix, indexes))
            except StackError as error:
                logger.warning(f"{prefix} runs one expert after the other: {error.reason}")
                for inner, pending in experts.separate():
                    self._pending[f"{prefix}.{inner}"] = indexes[inner], pending
                continue
            model.set_submodule(prefix, stack)


def _why_dense(model: Any, name: str, taken: dict[int, str]) -> str:
    module = model.get_submodule(name)
    if isinstance(module, nn.Embedding):
        return taken.get(id(module)) or why_not_embedding(module)
    fits = isinstance(module, PendingLinear) or is_linear(module)
    return taken.get(id(module)) or ("" if fits else f"{type(module).__name__} shares its weight")
