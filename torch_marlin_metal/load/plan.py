"""The plan of a load: the position of each checkpoint tensor in the model, and the source of each model tensor."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from torch_marlin_metal.checkpoints.options import typed
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.float_experts import ExpertFinder, is_stack
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.load.caller import Caller
from torch_marlin_metal.load.model_tensors import ModelTensors
from torch_marlin_metal.load.names import shared_prefix
from torch_marlin_metal.load.places import ExpertsPlace, FloatTensor, LoadPlan, Place, Spot
from torch_marlin_metal.models.experts import ExpertLayers
from torch_marlin_metal.models.gguf_settings import check_settings
from torch_marlin_metal.models.linear_layers import (
    COMPUTED,
    ModelMismatchError,
    linear_shape,
    listing,
    why_not_table,
)
from torch_marlin_metal.models.reasons import taken_weights
from torch_marlin_metal.models.swap import Target
from torch_marlin_metal.patterns import check_patterns, selects

FLOATS = ("F16", "BF16", "F32", "F64")
EXCLUDED = "excluded: decoded to floats"
# Scales of ModelOpt and compressed-tensors for a quantized cache, and of torchao for quantized activations.
UNUSED = (".k_scale", ".v_scale", ".output_scale", ".act_quant_scale", ".output_act_quant_scale")
SCALES = "scales of quantized activations or caches, which stay floats here"
EXAMPLES = 3  # the number of the model's own layers that an error message lists


def plan_load(model: nn.Module, reader: CheckpointReader, caller: Caller) -> LoadPlan:
    """Makes the plan. Reads only names and headers of the checkpoint, and does not change the model.

    Args:
        model: the model, which may be on the meta device.
        reader: the checkpoint.
        caller: the caller's options.

    Raises:
        ModelMismatchError: a layer or tensor has no position in the model, a tensor of the model has no source, only a
            part of a mixture is packed, or a setting differs between a GGUF file and the model.
        ValueError: a pattern of `exclude` matches nothing.
    """
    if reader.options.on_unsupported is None:
        reader.options = replace(reader.options, on_unsupported="dequantize")
    return _Planner(model, reader, caller).plan()


class _Planner:
    def __init__(self, model: nn.Module, reader: CheckpointReader, caller: Caller) -> None:
        self._model, self._reader, self._caller = model, reader, caller
        self._plan = LoadPlan()
        self._targets: dict[str, Target] = {}
        by_module: dict[int, Target] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._targets[name] = by_module.setdefault(id(module), Target([], module))
            self._targets[name].names.append(name)
        self._finder = ExpertFinder({name: target.module for name, target in self._targets.items()}, is_stack)
        self._taken = taken_weights(model)
        self._others = [(source, read, kind) for source, read, kind in reader.others()]

    def plan(self) -> LoadPlan:
        plan = self._plan
        if self._reader.metadata:
            plan.unknown_settings = check_settings(
                self._caller.op,
                self._reader.path,
                self._model,
                self._reader.metadata,
                self._reader.tensors,
                self._caller.ignore or (),
            )
        names = [name for name, _, _ in self._others]
        plan.prefix = shared_prefix(
            self._reader.layer_names, names, lambda name: self._has(self._caller.find(name)), self._caller.hosted
        )
        self._layers()
        self._whole_experts()
        dense = {self._find(name) for name in names}
        self._tie({name.removesuffix(".weight") for name in dense if name is not None and name.endswith(".weight")})
        excludable = [name for place in plan.places for name in place.names()]
        for prefix, experts in plan.experts.items():
            excludable += [*experts.target.names, *(f"{prefix}.{inner}" for inner in experts.shapes)]
        check_patterns(self._caller.op, excludable, **{self._caller.exclude_argument: self._caller.exclude})
        for place in plan.places:
            place.dense = self._why_dense(place)
        self._tie_biases(dense)
        self._leave_scales_out()
        if self._caller.hosted:
            self._refuse_codes()
        else:
            self._float_tensors()
        return plan

    def _leave_scales_out(self) -> None:
        """Removes scales of quantized activations and caches from the plan. Both stay in floats in this package."""
        tensors = ModelTensors(self._model)
        plan = self._plan
        plan.unused = [
            name for name, _, _ in self._others if name.endswith(UNUSED) and (self._find(name) or "") not in tensors
        ]
        if plan.unused:
            endings = ", ".join(sorted({f"*.{name.rpartition('.')[2]}" for name in plan.unused}))
            plan.left_out[f"{endings} ({len(plan.unused)} tensors)"] = SCALES
            self._others = [other for other in self._others if other[0] not in set(plan.unused)]

    def _refuse_codes(self) -> None:
        """Raises an error for 8-bit codes outside the layers, because the host library would load them as values."""
        names = [name for name, _, _ in self._others if "scale" in name]
        for source, _, dtype in self._others:
            if dtype not in ("F8_E4M3", "F8_E5M2", "I8", "U8"):
                continue
            base = source.removesuffix(".weight")
            for one in names:
                if one != source and one.startswith((f"{base}.", f"{base}_")) and "scale" in one[len(base) :]:
                    codes = f"tensor {source!r} holds codes ({dtype}) with the scales {one!r}"
                    raise self._error(f"{codes}, but is no layer of the format")

    def _find(self, source: str) -> str | None:
        return self._caller.find(source.removeprefix(self._plan.prefix))

    def _has(self, name: str | None) -> bool:
        return name is not None and (name in self._targets or self._finder.find(name) is not None)

    def _error(self, message: str) -> ModelMismatchError:
        return ModelMismatchError(f"{self._caller.op}: {self._reader.path}: {message}")

    def _layers(self) -> None:
        """Finds the position of each packed layer."""
        lost, absent = {}, {}
        taken: dict[int, str] = {}
        for index, source in enumerate(self._reader.layer_names):
            name = self._find(source)
            if name is None:
                self._plan.left_out[source] = "rename gives it no name"
            elif name in self._targets:
                target = self._targets[name]
                if id(target) in taken:
                    raise self._error(f"{taken[id(target)]} and {source} are one module of the model, {name}")
                taken[id(target)] = source
                self._plan.places.append(Place(index, source, Spot(target, linear_shape(target.module))))
            elif found := self._finder.find(name):
                self._add_expert(index, source, name, *found)
            elif selects(self._caller.ignore, name) or selects(self._caller.ignore, source):
                self._plan.left_out[source] = "ignore"
            elif self._caller.hosted and (self._caller.unused(source) or name.split(".")[0] not in self._targets):
                absent[source] = name
            else:
                lost[source] = name
        if absent and not self._plan.places and not self._plan.experts:  # no name at all matches
            lost |= absent
        if lost:
            raise self._no_place([f"{source} (packed layer)" for source in lost], next(iter(lost.values())))
        self._plan.left_out |= dict.fromkeys(absent, f"{type(self._model).__name__} has no such part")

    def _no_place(self, lost: list[str], example: str) -> ModelMismatchError:
        own = [name for name, target in self._targets.items() if linear_shape(target.module) is not None]
        like = f" for example {', '.join(own[:EXAMPLES])}" if own else " none"
        return self._error(
            f"{type(self._model).__name__} has no place for {listing(lost)}; its own Linear layers are{like}; "
            f"{typed('ignore', example)} leaves a layer or tensor out"
        )

    def _add_expert(self, index: int, source: str, name: str, prefix: str, parts: tuple[str, ...]) -> None:
        experts = self._experts_of(prefix, parts)
        inner = name.removeprefix(f"{prefix}.")
        if inner in experts.indexes or inner not in experts.shapes:
            raise self._error(f"layer {source!r}: the model has no place for it beside other experts' layers")
        experts.indexes[inner] = index

    def _experts_of(self, prefix: str, parts: tuple[str, ...]) -> ExpertsPlace:
        """Returns the `ExpertsPlace` of an experts module. Makes it when the first layer of the module is found."""
        target = self._targets[prefix]
        if target.name not in self._plan.experts:
            layers = ExpertLayers.of(target.module, parts)
            self._plan.experts[target.name] = ExpertsPlace(target, layers, dict(layers.all_names()))
        return self._plan.experts[target.name]

    def _whole_experts(self) -> None:
        """Raises an error for mixtures that lack a layer, and determines the mixtures that are decoded to floats."""
        if self._reader.metadata or any(each.shapes.keys() - each.indexes for each in self._plan.experts.values()):
            self._float_experts()
        lost = [
            f"{name}.{inner}"
            for name, experts in self._plan.experts.items()
            for inner in experts.shapes.keys() - experts.indexes.keys() - experts.floats.keys()
        ]
        if lost:
            raise self._error(f"the experts of a mixture lack the layers {listing(lost)}")
        decodes = self._reader.options.on_unsupported == "dequantize"
        for name, experts in self._plan.experts.items():
            if any(selects(self._caller.exclude, own, experts.target.module) for own in experts.target.names):
                experts.dense = EXCLUDED
            elif experts.layers.why_unknown and decodes:
                experts.dense = experts.layers.why_unknown
            elif experts.layers.why_unknown:
                raise self._error(f"experts {name!r}: {experts.layers.why_unknown}; {self._decodes()}")

    def _float_experts(self) -> None:
        """Finds the experts' layers that the checkpoint stores in floats, next to packed layers."""
        tensors = {source: read for source, read, kind in self._others if kind in FLOATS}
        taken = set()
        for source in tensors:
            layer = source.removesuffix(".weight")
            name = self._find(layer) if layer != source else None
            found = None if name is None or name in self._targets else self._finder.find(name)
            if found is None or name is None:
                continue
            experts = (
                self._experts_of(*found)
                if self._reader.metadata
                else self._plan.experts.get(self._targets[found[0]].name)
            )
            if experts is None:
                continue
            inner = name.removeprefix(f"{found[0]}.")
            if inner in experts.shapes and inner not in experts.indexes:
                experts.floats[inner] = tensors[source], tensors.get(f"{layer}.bias")
                taken |= {source, f"{layer}.bias"}
        self._others = [other for other in self._others if other[0] not in taken]

    def _decodes(self) -> str:
        return f"{typed('on_unsupported', 'dequantize')} decodes it to floats"

    def _tie(self, dense: set[str]) -> None:
        """Finds the modules that share a packed layer's weight but are not in the checkpoint.

        `dense` are the modules whose weight is stored in floats.
        """
        packed = {name: place for place in self._plan.places for name in place.spot.target.names}
        groups: dict[str, list[str]] = {}
        for name, source in self._caller.ties.items():
            groups.setdefault(source, [source]).append(name)
        for source, names in groups.items():
            held = [name for name in names if name in packed]
            if not held:
                continue
            stays = source in dense and source not in packed  # True: the modules share a weight in floats
            for name in names:
                if name != source and (name in packed or not stays):
                    self._plan.settled.add(name)
                user = self._targets.get(name)
                if user is None or name in packed or name in dense or stays:
                    continue
                users = packed[held[0]].users
                if all(user is not spot.target for spot in users):
                    users.append(Spot(user, linear_shape(user.module)))

    def _tie_biases(self, dense: set[str | None]) -> None:
        """Finds biases that are also tensors of other modules, as in the heads of BERT and similar models.

        `dense` are the model's tensors that are stored in floats.
        """
        tensors = ModelTensors(self._model)
        replaced = {f"{name}.bias" for place in self._plan.places for name in place.spot.target.names}
        ties = [*self._caller.bias_ties.items(), *((one, other) for other, one in self._caller.bias_ties.items())]
        for place in self._plan.places:
            bias = f"{place.spot.name}.bias"
            if bias in tensors:
                tied = [*tensors.names_of(bias), *(other for one, other in ties if one == bias)]
                others = [name for name in dict.fromkeys(tied) if name not in replaced]
                place.bias_from = next((name for name in others if name in dense), "")
                place.bias_to = [] if place.bias_from else others

    def _why_dense(self, place: Place) -> str:
        """Returns the reason to decode a weight to floats, or "". Modules with a shared weight are decoded together."""
        for spot in place.spots():
            target = spot.target
            if any(selects(self._caller.exclude, name, target.module) for name in target.names):
                reason = EXCLUDED
            else:
                reason = self._why_floats(place, spot)
            if reason:
                return reason if spot is place.spot else f"its weight is also that of {spot.name}: {reason}"
        return ""

    def _why_floats(self, place: Place, spot: Spot) -> str:
        module = spot.target.module
        if (reason := self._taken.get(id(module), "")) or spot.shape is not None:
            return reason
        if isinstance(module, (nn.Embedding, MarlinEmbedding)):
            reason = why_not_table(module)
        else:
            reason, place.no_layer = f"{type(module).__name__} is no nn.Linear", True
            weight = getattr(module, "weight", None)
            if not isinstance(weight, Tensor) or weight.dim() != 2:
                raise self._error(
                    f"layer {spot.name!r}: expected nn.Linear in the model for a packed layer, got "
                    f"{type(module).__name__}"
                )
        if reason and spot is place.spot and self._reader.options.on_unsupported == "error":
            raise self._error(
                f"layer {spot.name!r}: it is packed in the checkpoint, but in the model: {reason}; {self._decodes()}"
            )
        return reason

    def _float_tensors(self) -> None:
        """Finds the positions of the other tensors, and checks that each tensor of the model is set."""
        tensors, plan, caller = ModelTensors(self._model), self._plan, self._caller
        filled = {f"{name}.weight" for place in plan.places for name in place.names()}
        filled |= {f"{name}.bias" for place in plan.places if place.no_layer for name in place.spot.target.names}
        replaced = [place.spot.target for place in plan.places if _is_replaced(place.spot)]
        replaced += [experts.target for experts in plan.experts.values()]
        gone = tuple(f"{name}." for target in replaced for name in target.names)
        filled |= {name for name in tensors if name.startswith(gone)}
        filled |= {name for place in plan.places for name in place.bias_to}
        found: dict[str, FloatTensor] = {}
        lost: dict[str, str] = {}
        plan.floats = []
        for source, read, kind in self._others:
            name = self._find(source)
            if name is None or selects(COMPUTED, name):
                plan.left_out[source] = "the model computes it" if name is not None else "rename gives it no name"
            elif name not in tensors:
                if not (selects(caller.ignore, name) or selects(caller.ignore, source)):
                    lost[source] = name
                plan.left_out[source] = "ignore"
            elif name not in found:
                names = [other for other in tensors.names_of(name) if other == name or other not in filled]
                plan.floats.append(FloatTensor(source, names, _checked(caller.op, name, tensors.get(name), read, kind)))
                found |= dict.fromkeys(names, plan.floats[-1])
            elif selects(caller.ignore, source):
                plan.left_out[source] = "ignore"
            else:
                found[name].others[source] = _checked(caller.op, name, tensors.get(name), read, kind)
        if lost:
            raise self._no_place(list(lost), next(iter(lost.values())))
        others = [name for name in tensors if name not in found and name not in filled]
        kept = {name for name in others if selects(caller.keep, name)}
        if missing := [name for name in others if name in tensors.persistent and name not in kept]:
            raise self._error(
                f"the checkpoint lacks {listing(missing)}; {typed('keep', missing[0])} keeps the model's values"
            )
        plan.initialized = [name for name in others if tensors.get(name).is_meta]


def _is_replaced(spot: Spot) -> bool:
    """Returns True if a new layer, with all its tensors, replaces the module."""
    return spot.shape is not None or isinstance(spot.target.module, MarlinLinear)


def _checked(op: str, name: str, old: Tensor, read: Callable[[], Tensor], kind: str) -> Callable[[], Tensor]:
    def read_checked() -> Tensor:
        tensor = read()
        if tensor.shape != old.shape:
            raise ModelMismatchError(
                f"{op}: tensor {name!r}: expected shape {list(old.shape)} as in the model, got {list(tensor.shape)}"
            )
        if (kind not in FLOATS) if old.is_floating_point() else (tensor.dtype != old.dtype):
            raise ModelMismatchError(f"{op}: tensor {name!r}: expected {old.dtype} as in the model, got {kind}")
        return tensor

    return read_checked
