"""Finds what `load_quantized` reads, and the modules and tensors of the model that it fills."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from torch_marlin_metal.checkpoints.options import OnUnsupported
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.float_experts import ExpertFinder, is_stack
from torch_marlin_metal.models.empty_model import (
    COMPUTED,
    LinearShape,
    ModelMismatchError,
    Slots,
    linear_shape,
    listing,
    why_not_table,
)
from torch_marlin_metal.models.experts import ExpertLayers
from torch_marlin_metal.models.swap import Target
from torch_marlin_metal.patterns import NameFilter, selects

OP = "load_quantized"
FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class LoadPlan:
    """What to load, and the modules and tensors to fill.

    `layers` has a pair (index in the reader, target) for each packed layer, and `others` has a pair (names in the
    model, function that reads the tensor) for each other tensor. `tied` is for modules that have no tensor in the
    checkpoint, because they share the weight of an embedding. It maps the id of the module's target to a pair (that
    target, the embedding's target). `experts` maps the id of a target to the experts module of a mixture that has it.
    """

    layers: list[tuple[int, Target]]
    others: list[tuple[list[str], Callable[[], Tensor]]]
    tied: dict[int, tuple[Target, Target]]
    experts: dict[int, "PlannedExperts"]

    def filled(self) -> list[Target]:
        """Returns the targets that 4-bit layers of the checkpoint fill."""
        return [target for _, target in self.layers] + [experts.target for experts in self.experts.values()]


@dataclass(frozen=True)
class PlannedExperts:
    """An experts module, with the shape of each of its layers and the layer's index in the reader."""

    target: Target
    layers: ExpertLayers
    shapes: dict[str, LinearShape]
    indexes: dict[str, int]


def plan_load(
    model: nn.Module,
    reader: CheckpointReader,
    slots: Slots,
    name_of: Callable[[str], str | None],
    ignore: NameFilter,
    keep: NameFilter,
) -> LoadPlan:
    """Finds the target of every layer and tensor. Reads only names and headers."""
    plan, unexpected = LoadPlan([], [], {}, {}), []
    targets: dict[str, Target] = {}
    by_module: dict[int, Target] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        targets[name] = by_module.setdefault(id(module), Target([], module))
        targets[name].names.append(name)
    finder = ExpertFinder({name: target.module for name, target in targets.items()}, is_stack)
    taken: dict[int, str] = {}
    for index, source in enumerate(reader.layer_names):
        name = name_of(source)
        if name is None or (name not in targets and selects(ignore, name)):
            continue
        if name not in targets and (found_experts := finder.find(name)):
            _add_expert(plan, index, name, targets[found_experts[0]], found_experts[1])
            continue
        if name not in targets:
            unexpected.append(f"{name} (4-bit layer)")
            continue
        target = targets[name]
        _check_kind(target, reader.options.on_unsupported)
        if id(target) in taken:
            raise ModelMismatchError(f"{OP}: {taken[id(target)]} and {name} are one module of the model")
        taken[id(target)] = name
        plan.layers.append((index, target))

    for experts in plan.experts.values():
        if lost := [f"{experts.target.name}.{name}" for name in experts.shapes.keys() - experts.indexes]:
            raise ModelMismatchError(
                f"{OP}: {reader.path}: expected every expert in 4 bit or none, got no 4-bit layer for {listing(lost)}"
            )
    replaced = {f"{name}." for target in plan.filled() for name in target.names}
    found: set[str] = set()
    for source, read, kind in reader.others():
        name = name_of(source)
        if name is None or selects(COMPUTED, name):
            continue
        if name not in slots:
            if not selects(ignore, name):
                unexpected.append(name)
        elif name not in found:
            names = slots.names_of(name)
            plan.others.append((names, _checked(name, slots.get(name), read, kind)))
            found.update(names)
    if unexpected:
        raise ModelMismatchError(f"{OP}: {reader.path}: the model has no place for {listing(unexpected)}")
    dense = {name for name in slots.persistent if name.rpartition(".")[0] + "." not in replaced}
    for _, target in plan.layers:
        for other in [other for name in _weights(target, slots) for other in slots.names_of(name)]:
            user = targets[other.rpartition(".")[0]]
            if user is not target and id(user) not in taken:
                plan.tied[id(user)] = user, target
    tied = {other for _, target in plan.layers for name in _weights(target, slots) for other in slots.names_of(name)}
    missing = {name for name in dense - found - tied if not selects(keep, name)}
    if missing:
        raise ModelMismatchError(f"{OP}: {reader.path}: the checkpoint lacks {listing(missing)}")
    return plan


def _add_expert(plan: LoadPlan, index: int, name: str, target: Target, parts: tuple[str, ...]) -> None:
    """Adds the layer of an expert to the plan.

    Args:
        plan: changed in place.
        index: the layer's index in the reader.
        name: the layer's name in the model.
        target: the experts module.
        parts: see `ExpertLayers`.
    """
    if id(target) not in plan.experts:
        layers = ExpertLayers.of(target.module, parts)
        plan.experts[id(target)] = PlannedExperts(target, layers, dict(layers.all_names()), {})
    experts = plan.experts[id(target)]
    inner = next(name.removeprefix(f"{own}.") for own in target.names if name.startswith(f"{own}."))
    if inner in experts.indexes or inner not in experts.shapes:
        raise ModelMismatchError(f"{OP}: layer {name!r}: the model has no place for it beside other experts' layers")
    experts.indexes[inner] = index


def _check_kind(target: Target, on_unsupported: OnUnsupported) -> None:
    module = target.module
    if linear_shape(module) is not None:
        return
    if not isinstance(module, (nn.Embedding, MarlinEmbedding)):
        raise ModelMismatchError(
            f"{OP}: layer {target.name!r}: expected nn.Linear in the model for a 4-bit layer, "
            f"got {type(module).__name__}"
        )
    if on_unsupported == "error" and (reason := why_not_table(module)):
        raise ModelMismatchError(
            f"{OP}: layer {target.name!r}: the checkpoint stores this embedding in 4 bit, but {reason}; "
            "on_unsupported='dequantize' decodes it to floats"
        )


def _weights(target: Target, slots: Slots) -> list[str]:
    """Returns all names of an embedding's weight. Returns none for a Linear, whose weight the new layer replaces."""
    return [f"{name}.weight" for name in target.names if f"{name}.weight" in slots and not linear_shape(target.module)]


def _checked(name: str, old: Tensor, read: Callable[[], Tensor], kind: str) -> Callable[[], Tensor]:
    def read_checked() -> Tensor:
        tensor = read()
        if tensor.shape != old.shape:
            raise ModelMismatchError(
                f"{OP}: tensor {name!r}: expected shape {list(old.shape)} as in the model, got {list(tensor.shape)}"
            )
        if (kind not in FLOATS) if old.is_floating_point() else (tensor.dtype != old.dtype):
            raise ModelMismatchError(f"{OP}: tensor {name!r}: expected {old.dtype} as in the model, got {kind}")
        return tensor

    return read_checked
