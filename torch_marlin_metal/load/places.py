"""The data of a load plan: the position of each layer and tensor of a checkpoint in the model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from torch_marlin_metal.models.experts import ExpertLayers
from torch_marlin_metal.models.linear_layers import LinearShape
from torch_marlin_metal.models.swap import Target


@dataclass(frozen=True)
class Spot:
    """A module of the model that receives a weight.

    Attributes:
        target: the module.
        shape: the shape of the Linear that a new layer replaces. None for an embedding, and for a module that receives
            decoded values.
    """

    target: Target
    shape: LinearShape | None

    @property
    def name(self) -> str:
        """Returns the module's first name."""
        return self.target.name


@dataclass
class Place:
    """The position of one packed layer of the checkpoint in the model.

    Attributes:
        index: the layer's index in the reader.
        source: the layer's name in the checkpoint.
        spot: the module that the checkpoint names.
        users: modules that share the weight but are not in the checkpoint. The loader fills them too.
        dense: the reason why the layer is decoded to floats, or "".
        no_layer: True if the reason is that the model's class supports only floats there, for example in a router.
        bias_from: the model's name of a tensor in the checkpoint that belongs to another module and is also the layer's
            bias, else "".
        bias_to: the model's names of tensors that the checkpoint lacks and that are also the layer's bias.
    """

    index: int
    source: str
    spot: Spot
    users: list[Spot] = field(default_factory=list)
    dense: str = ""
    no_layer: bool = False
    bias_from: str = ""
    bias_to: list[str] = field(default_factory=list)

    def spots(self) -> list[Spot]:
        """Returns all modules that receive the weight."""
        return [self.spot, *self.users]

    def names(self) -> list[str]:
        """Returns all names of these modules."""
        return [name for spot in self.spots() for name in spot.target.names]


@dataclass
class ExpertsPlace:
    """An experts module with, for each of its layers, the shape and the index in the reader.

    `dense` is the reason why the complete module is decoded to floats, or "". `floats` maps each layer that is stored
    in floats to the functions that read its weight and bias.
    """

    target: Target
    layers: ExpertLayers
    shapes: dict[str, LinearShape]
    indexes: dict[str, int] = field(default_factory=dict)
    floats: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor] | None]] = field(default_factory=dict)
    dense: str = ""


@dataclass
class FloatTensor:
    """A tensor outside the packed layers: its names in the model, and a function that reads and checks it.

    `others` are further checkpoint tensors with the same position in the model, and the functions that read them.
    """

    source: str
    names: list[str]
    read: Callable[[], Tensor]
    others: dict[str, Callable[[], Tensor]] = field(default_factory=dict)


@dataclass
class LoadPlan:
    """The position of each layer and tensor of a checkpoint in a model.

    Attributes:
        prefix: a prefix of the checkpoint's names that the model's names lack, or "".
        places: the packed layers outside mixtures.
        experts: the experts of mixtures, by the name of their module.
        left_out: layers and tensors of the checkpoint that are not loaded: name in the checkpoint -> reason.
        unused: the scales of quantized activations or caches in `left_out`.
        settled: modules that the loader ties to another module, so that a host library must not tie them.
        floats: the tensors that this package loads, or None if a host library loads them.
        unknown_settings: keys of a GGUF file whose meaning for the model is unknown.
        initialized: tensors of the model that are in no file. The model's class initializes them.
    """

    prefix: str = ""
    places: list[Place] = field(default_factory=list)
    experts: dict[str, ExpertsPlace] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)
    floats: list[FloatTensor] | None = None
    initialized: list[str] = field(default_factory=list)
    unknown_settings: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yields (name in the checkpoint, name in the model, "packed" or "decoded" with details) for reports."""
        for place in self.places:
            what = f"decoded: {place.dense}" if place.dense else "packed"
            for spot in place.spots():
                yield place.source, spot.name, what if spot is place.spot else f"{what}, tied"
        for name, experts in self.experts.items():
            what = f"decoded: {experts.dense}" if experts.dense else "packed"
            yield f"{len(experts.indexes)} layers", name, what
        for tensor in self.floats or ():
            yield tensor.source, ", ".join(tensor.names), "loaded unchanged"
        for name in self.initialized:
            yield "", name, "computed by the model's class"
        for source, reason in self.left_out.items():
            yield source, "", f"left out: {reason}"
