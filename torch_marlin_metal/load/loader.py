"""Executes the plan of a load: sets placeholders, then replaces them by packed layers one at a time."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from torch_marlin_metal.checkpoints.files.safetensors import keep_file_open
from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.options import typed
from torch_marlin_metal.checkpoints.reader import CheckpointReader, DenseWeight
from torch_marlin_metal.layers.experts import ExpertWeights, StackError
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.load.caller import Caller, Split
from torch_marlin_metal.load.model_tensors import Changes, ModelTensors
from torch_marlin_metal.load.placeholder import PendingExperts, PendingLinear
from torch_marlin_metal.load.places import ExpertsPlace, Place, Spot
from torch_marlin_metal.load.plan import EXCLUDED, SCALES, plan_load
from torch_marlin_metal.load.share import FloatShare, planned_share
from torch_marlin_metal.load.unset import initialize
from torch_marlin_metal.models.decode_experts import decode_experts
from torch_marlin_metal.models.gguf_settings import unknown_keys
from torch_marlin_metal.models.linear_layers import (
    ModelMismatchError,
    fit_bias,
    fit_layer,
    fit_table,
    fit_weight,
    is_transposed,
    misfit,
    real_device,
)
from torch_marlin_metal.models.report import LayerReport, module_bytes
from torch_marlin_metal.models.swap import Target, inherit
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.patterns import selects

EXPERT = re.compile(r"\.experts\.\d+\.")
AHEAD_SHARE = 64  # the fraction 1/64 of the layers' bytes is read ahead; this memory is needed in addition
MOST_AHEAD, LEAST_AHEAD = 1 << 27, 1 << 22  # limits in bytes for the memory that is read ahead


class Loader:
    """Loads a checkpoint into a model. The constructor makes a plan, and `place` and `fill` execute it.

    Args:
        model: changed in place.
        reader: the checkpoint.
        caller: the caller's options.
        warn: shows a warning about layers that are packed in the file but not in the model.

    Attributes:
        plan: the position of each layer and tensor of the checkpoint in the model.
        changes: the changes to the model, so that callers can undo them.
    """

    def __init__(self, model: nn.Module, reader: CheckpointReader, caller: Caller, warn: Callable[[str], None]) -> None:
        self._model, self._reader, self._caller, self._warn = model, reader, caller, warn
        self._tensors = ModelTensors(model)
        self._before = {id(module): module_bytes(module) for module in model.modules()} if not caller.hosted else {}
        self.plan = plan_load(model, reader, caller)
        if self.plan.unknown_settings:
            warn(f"{caller.op}: {unknown_keys(reader.path, self.plan.unknown_settings)}")
        self.changes = Changes(model)
        self._back: list[Target] = []
        self._planned, self._late = planned_share(self.plan, reader, caller), FloatShare(reader)
        self._warn_of_floats()

    def _warn_of_floats(self) -> None:
        """Warns about layers that are decoded to floats without the caller's request."""
        for place in self.plan.places:
            if place.dense and not (place.dense.endswith(EXCLUDED) or place.no_layer):
                self._warn(f"{place.spot.name} is decoded to floats: {place.dense}")
        for experts in self.plan.experts.values():
            if experts.dense and experts.dense != EXCLUDED:
                self._warn(f"{experts.target.name} is decoded to floats: {experts.dense}")
        self._tell(self._planned)

    def _tell(self, share: FloatShare) -> None:
        if told := share.sentence():
            self._warn(f"{self._caller.op}: {told}")

    def place(self) -> None:
        """Puts placeholders into the model, so that a host library does not report or create the packed weights."""
        for place in self.plan.places:
            for spot in place.spots():
                if spot.shape is not None and spot is place.spot:
                    self._replace(spot.target, PendingLinear(spot.shape))
                elif spot.target.module._parameters.get("weight") is not None:
                    self.changes.hollow_out(spot.target.module, "weight")
            for name in place.bias_to:
                self.changes.hollow_out(*self._tensors.owner(name))
        for experts in self.plan.experts.values():
            self._replace(experts.target, PendingExperts(experts.target.module))

    def fill(self, split: Split | None = None) -> list[LayerReport]:
        """Reads the packed layers and replaces the placeholders. Returns a report for each layer.

        Args:
            split: loads this process's part of some layers.
        """
        plan, reader = self.plan, self._reader
        used = {place.index for place in plan.places}
        used |= {index for experts in plan.experts.values() for index in experts.indexes.values()}
        reader.leave_out(set(range(len(reader))) - used)
        if split is not None:
            self._begin_split(split)
        report: list[LayerReport] = []
        total = len(plan.places) + len(plan.experts)
        bar = tqdm(total=total, desc="Loading packed layers", unit="layer", disable=not self._caller.progress)
        with bar, keep_file_open():
            for experts in plan.experts.values():
                report.append(self._fill_experts(experts))
                bar.update()
            for place in sorted(plan.places, key=lambda place: place.index):
                with torch.inference_mode(False):  # tensors made in inference mode cannot be used in training later
                    report += self._fill(place, split)
                bar.update()
        self._complete()
        self._tell(self._late)
        report += [LayerReport(name, "", reason=why) for name, why in plan.left_out.items() if why == SCALES]
        return report

    def _complete(self) -> None:
        """Initializes the tensors of restored modules that still have no values. These modules hold decoded weights."""
        names = [
            f"{target.name}.{key}"
            for target in self._back
            for held in (target.module._parameters, target.module._buffers)
            for key, tensor in held.items()
            if tensor is not None and tensor.is_meta
        ]
        device = self._caller.device_of(names[0] if names else "") or torch.device("cpu")
        initialize(self._caller.op, self._model, self._tensors, names, device, self.changes)

    def fill_floats(self) -> None:
        """Loads the tensors outside the packed layers, and lets the model's classes initialize missing tensors."""
        caller = self._caller
        for tensor in self.plan.floats or ():
            old = self._tensors.get(tensor.names[0])
            device = caller.device_of(tensor.names[0]) or real_device(old.device)
            dtype = (caller.dtype if old.is_floating_point() else None) or old.dtype
            values = tensor.read()
            for source, read in tensor.others.items():
                if not torch.equal(values, read()):
                    raise ModelMismatchError(
                        f"{caller.op}: {self._reader.path}: {tensor.source!r} and {source!r} are one tensor of the "
                        f"model, {tensor.names[0]!r}, but differ; {typed('ignore', source)} leaves one out"
                    )
            self.changes.set_tensors(self._tensors, tensor.names, values.to(device, dtype))
        device = caller.device_of("") or torch.device("cpu")
        initialize(caller.op, self._model, self._tensors, self.plan.initialized, device, self.changes)

    def _replace(self, target: Target, new: nn.Module) -> None:
        inherit(new, target.module)
        self.changes.replace(target.names, new)

    def _begin_split(self, split: Split) -> None:
        places = self.plan.places
        layers = {n: place.spot.shape for place in places for n in place.spot.target.names}
        tied = [place for place in places if place.dense or place.bias_from or place.bias_to]
        whole = {name for place in tied for name in place.names()}
        whole |= {name for place in places for spot in place.users for name in spot.target.names}
        whole |= {name for name, shape in layers.items() if shape is None}
        for prefix, experts in self.plan.experts.items():
            named = {f"{prefix}.{inner}": shape for inner, shape in experts.shapes.items()}
            layers |= named
            whole |= {name for name in named if experts.dense or selects(self._caller.exclude, name)}
        parts = {name: shape for name, shape in layers.items() if shape is not None and name not in whole}
        split.begin(self._caller.op, self._model, parts, whole, self._reader)

    def _fill(self, place: Place, split: Split | None) -> Iterator[LayerReport]:
        spot, caller = place.spot, self._caller
        device = caller.device_of(spot.name)
        if split is not None and spot.shape is not None and not place.dense:
            names = spot.target.names
            part = split.load(
                caller.op, names, spot.shape, self._reader, place.index, device=device, dtype=caller.dtype
            )
            if isinstance(part, MarlinLinear):
                self._put(spot.target, part)
                yield self._report(spot, part)
                return
        weight = self._reader.read(place.index)
        if weight is not None and weight.bias is None and place.bias_from:
            weight = replace(weight, bias=self._model.get_parameter(place.bias_from))
        if weight is None:
            yield from self._skip(place)
            self._share_bias(place)
        elif not self._has_size(spot, weight):
            yield from self._reinitialize(place)
            self._share_bias(place)
        elif isinstance(weight, DenseWeight) or place.dense:
            reason = place.dense or getattr(weight, "reason", "")
            values = self._decode(place, weight, device)
            if isinstance(weight, DenseWeight) and not place.dense.endswith(EXCLUDED):
                self._add_late(place.index, weight.kind, values.nbytes)
            self._share_bias(place)
            for one in place.spots():
                why = reason if one is spot else f"its weight is that of {spot.name}"
                yield self._report(one, one.target.module, why)
        else:
            first = self._pack(spot, weight, device)
            self._share_bias(place)
            yield self._report(spot, first)
            for user in place.users:
                shared = replace(first.to_packed(), bias=user.target.module._parameters.get("bias"))
                yield self._report(user, self._pack(user, shared, first.b_packed.device))

    def _add_late(self, index: int, kind: str, held: int) -> None:
        """Counts a layer that was decoded to floats, unless `planned_share` counted it before the load."""
        if index not in self._planned.indexes:
            self._late.add(index, kind, held)

    def _has_size(self, spot: Spot, weight: PackedWeight | DenseWeight) -> bool:
        """Returns True if a weight has the expected size. Raises an error if the caller refuses other sizes."""
        size = weight.values if isinstance(weight, DenseWeight) else weight
        found = [size.N, size.K]
        old, shape = self._held(spot.target), spot.shape
        expected = [shape.N, shape.K] if shape is not None else found if old is None else list(old.shape)
        where = misfit(spot.name, expected, found)
        if not where:
            return True
        if self._caller.reinitializes:
            self._warn(f"{where}, so the model's class initializes the layer")
            return False
        if self._caller.reinitializes is not None:
            where += "; ignore_mismatched_sizes=True initializes the model's layer"
        raise ModelMismatchError(f"{self._caller.op}: {where}")

    def _reinitialize(self, place: Place) -> Iterator[LayerReport]:
        """Skips a layer of the checkpoint, and lets the model's class initialize the module instead."""
        target, tensors = place.spot.target, self._tensors
        module, old = target.module, tensors.get(f"{target.name}.weight")
        self._put(target, module)
        self.changes.set_parameter(module, "weight", old, old)
        names = [name for key in module._parameters if (name := f"{target.name}.{key}") in tensors]
        device = self._caller.device_of(target.name) or real_device(old.device)
        initialize(self._caller.op, self._model, tensors, names, device, self.changes)
        for user in place.users:
            self.changes.set_parameter(user.target.module, "weight", module.get_parameter("weight"), old)
        for spot in place.spots():
            yield self._report(spot, spot.target.module, "it has another size in the checkpoint")

    def _pack(self, spot: Spot, weight: PackedWeight, device: torch.device | None) -> MarlinLinear:
        caller = self._caller
        layer: MarlinLinear
        if spot.shape is None:
            layer = fit_table(caller.op, spot.name, spot.target.module, weight, device=device, dtype=caller.dtype)
        else:
            layer = fit_layer(caller.op, spot.name, spot.shape, weight, device=device, dtype=caller.dtype)
        self._put(spot.target, layer)
        return layer

    def _share_bias(self, place: Place) -> None:
        module = self._model.get_submodule(place.spot.name)
        if place.bias_from and not isinstance(module, MarlinLinear):
            bias = self._model.get_parameter(place.bias_from)
            self.changes.set_parameter(module, "bias", bias, bias)
        if place.bias_to:
            self.changes.set_tensors(self._tensors, place.bias_to, module.get_parameter("bias"))

    def _put(self, target: Target, layer: nn.Module) -> None:
        """Replaces the module that currently has the target's names."""
        inherit(layer, self._model.get_submodule(target.name))
        self.changes.replace(target.names, layer)
        if layer is target.module:
            self._back.append(target)

    def _held(self, target: Target) -> Tensor | None:
        """Returns the weight that a module had before the load."""
        name = f"{target.name}.weight"
        if name in self._tensors:
            return self._tensors.get(name)
        return target.module._parameters.get("weight")  # the module belongs to an expert and was just created

    def _decode(self, place: Place, weight: PackedWeight | DenseWeight, device: torch.device | None) -> Tensor:
        """Restores the model's own module with decoded values. Modules with the same weight share the values."""
        target, caller = place.spot.target, self._caller
        module, old = target.module, self._held(target)
        if old is None:
            raise ModelMismatchError(
                f"{caller.op}: layer {target.name!r}: expected a layer with a weight to decode into, got "
                f"{type(module).__name__}"
            )
        rows = weight.values if isinstance(weight, DenseWeight) else FloatRows.of(weight)
        place_on, held = device or real_device(old.device), module._parameters.get("bias")
        sizes = (rows.K, rows.N) if is_transposed(module) else (rows.N, rows.K)
        values = torch.empty(sizes, dtype=caller.dtype or old.dtype, device=place_on)
        rows.write(values.T if is_transposed(module) else values)
        bias = fit_bias(caller.op, target.name, held, weight.bias)
        self._put(target, module)
        shared = self.changes.set_parameter(module, "weight", values, old)
        if bias is not None and held is not None:
            self.changes.set_parameter(module, "bias", bias.to(place_on, caller.dtype or held.dtype), held)
        for user in place.users:
            self.changes.set_parameter(user.target.module, "weight", shared, old)
        return shared

    def _skip(self, place: Place) -> Iterator[LayerReport]:
        """Leaves the model's layer unchanged (`on_unsupported="skip"`)."""
        for spot in place.spots():
            old = self._held(spot.target)
            if old is None or old.is_meta:
                raise ModelMismatchError(
                    f"{self._caller.op}: layer {spot.name!r}: it cannot be packed and on_unsupported='skip' leaves it "
                    "out, but the model's own layer has no values either"
                )
            self._put(spot.target, spot.target.module)
            self.changes.set_parameter(spot.target.module, "weight", old, old)
            yield self._report(spot, spot.target.module, "not read (on_unsupported='skip')")

    def _report(self, spot: Spot, layer: nn.Module, reason: str = "") -> LayerReport:
        shape = None if spot.shape is None else (spot.shape.N, spot.shape.K)
        before, kind = self._before.get(id(spot.target.module), 0), type(spot.target.module).__name__
        after = module_bytes(layer)
        if not isinstance(layer, MarlinLinear):
            return LayerReport(spot.name, kind, shape, bytes_before=before, bytes_after=after, reason=reason)
        sizes = (layer.out_features, layer.in_features)
        return LayerReport(spot.name, kind, sizes, layer.weight_format, layer.group_size, before, after)

    def _fill_experts(self, experts: ExpertsPlace) -> LayerReport:
        """Reads the experts of a mixture into stacks. If no weight format represents a stack, it is decoded to floats.

        Each weight is copied into the stack when it is read, so only one expert's weights need additional memory.
        """
        target, caller = experts.target, self._caller
        kind = type(target.module).__name__
        entry = LayerReport(target.name, kind, bytes_before=self._before.get(id(target.module), 0))
        if experts.dense:
            self._decode_experts(experts)
            return replace(entry, reason=experts.dense, bytes_after=module_bytes(target.module))
        reasons: dict[str, str] = {}

        def read(inner: str, floats: bool) -> PackedWeight | DenseWeight:
            name = f"{target.name}.{inner}"
            if not floats and selects(caller.exclude, name):
                raise StackError(EXCLUDED)
            return self._fit_expert(name, experts, inner)

        def became_floats(reason: str, inner: str, kind: str, held: int) -> None:
            reasons[inner] = reason
            if inner in experts.indexes and reason != EXCLUDED:
                self._add_late(experts.indexes[inner], kind or reason, held)

        with torch.inference_mode(False):
            stack = experts.layers.pack(read, caller.dtype, became_floats)
        self._put(target, stack)
        packed = [part for part in stack.modules() if isinstance(part, ExpertWeights)]
        if not packed:
            return replace(entry, reason=next(iter(reasons.values())), bytes_after=module_bytes(stack))
        entry = replace(entry, weight_format=packed[-1].weight_format, group_size=packed[-1].group_size)
        return replace(entry, bytes_after=module_bytes(stack))

    def _fit_expert(self, name: str, experts: ExpertsPlace, inner: str) -> PackedWeight | DenseWeight:
        caller, shape = self._caller, experts.shapes[inner]
        device = caller.device_of(name) or real_device(shape.device)
        weight = self._read_expert(experts, inner)
        if weight is None:
            raise ModelMismatchError(
                f"{caller.op}: layer {name!r}: it cannot be packed, and on_unsupported='skip' cannot leave out a part "
                "of a mixture's experts"
            )
        if isinstance(weight, PackedWeight):
            return fit_weight(caller.op, name, shape, weight, device=device, dtype=caller.dtype)
        if reason := misfit(name, [shape.N, shape.K], [weight.values.N, weight.values.K]):
            raise ModelMismatchError(f"{caller.op}: {reason}")
        held = fit_bias(caller.op, name, shape.bias, weight.bias)
        return replace(weight, values=weight.values.to(device), bias=None if held is None else held.to(device))

    def _read_expert(self, experts: ExpertsPlace, inner: str) -> PackedWeight | DenseWeight | None:
        if inner not in experts.floats:
            return self._reader.read(experts.indexes[inner])
        values, bias = experts.floats[inner]
        rows = FloatRows.of(values())
        return DenseWeight(inner, rows, None if bias is None else bias(), "floats in the checkpoint")

    def _decode_experts(self, experts: ExpertsPlace) -> None:
        target, caller = experts.target, self._caller
        module, path = target.module, self._reader.path
        held = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
        dtypes = {name: caller.dtype or tensor.dtype for name, tensor in held.items()}

        def read(inner: str) -> PackedWeight | DenseWeight:
            weight = self._read_expert(experts, inner)
            if weight is None:
                raise StackError(f"{inner} is skipped")
            return weight

        try:
            for name, values in decode_experts(experts.layers, read, dtypes):
                old = held[name]
                if values.shape != old.shape:
                    raise StackError(
                        f"expected {name} of {list(old.shape)} as in the model, the checkpoint's is "
                        f"{list(values.shape)}"
                    )
                device = caller.device_of(target.name) or real_device(old.device)
                self.changes.set_parameter(module, name, values.to(device), old)
        except StackError as error:
            raise ModelMismatchError(f"{caller.op}: {path}: experts {target.name!r}: {error.reason}") from error
        self._put(target, module)


def read_ahead(reader: CheckpointReader) -> None:
    """Starts threads that read layers in the order of `Loader.fill`, while a host library prepares the model."""
    names = reader.layer_names
    others = [index for index, name in enumerate(names) if not EXPERT.search(name)]
    experts = sorted(set(range(len(names))) - set(others))
    share = sum(map(reader.stored_bytes, range(len(names)))) // AHEAD_SHARE
    reader.read_ahead(experts + others, min(MOST_AHEAD, max(LEAST_AHEAD, share)))
