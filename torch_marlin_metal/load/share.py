"""Finds and counts the matrices of a checkpoint that are decoded to floats because no weight format represents them."""

from collections.abc import Iterator
from typing import Any

from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.options import typed
from torch_marlin_metal.checkpoints.reader import CheckpointReader, Refusal
from torch_marlin_metal.load.caller import Caller
from torch_marlin_metal.load.places import ExpertsPlace, LoadPlan, Spot
from torch_marlin_metal.load.plan import EXCLUDED
from torch_marlin_metal.models.linear_layers import LinearShape
from torch_marlin_metal.patterns import selects

MB = 1e6
SMALL = 0.01  # no warning below this share of the bytes, for example for routers, which mlx-lm stores in 8 bits


class FloatShare:
    """The layers of a checkpoint that are decoded to floats, grouped by kind.

    Attributes:
        indexes: the layers' indexes in the reader.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._stored: dict[str, int] = {}
        self._held = 0
        self.indexes: set[int] = set()

    def add(self, index: int, kind: str, held: int) -> None:
        """Adds a layer.

        Args:
            index: the layer's index in the reader.
            kind: see `DenseWeight.kind`.
            held: the bytes of the decoded layer.
        """
        self._stored[kind] = self._stored.get(kind, 0) + self._reader.stored_bytes(index)
        self._held += held
        self.indexes.add(index)

    def sentence(self) -> str:
        """Returns a sentence about the layers that are decoded to floats and their size, or "" for a small share."""
        stored, total = self._sizes()
        if stored < SMALL * total:
            return ""
        return (
            f"{self._reader.path}: {stored / total:.0%} of the bytes of its matrices have no weight format and "
            f"become floats: {self._kinds(total)}. They take {self._held / MB:.3g} MB instead of {stored / MB:.3g} MB; "
            f"{typed('on_unsupported', 'error')} refuses them"
        )

    def refusal(self) -> str:
        """Returns a sentence about the layers that cannot be loaded."""
        stored, total = self._sizes()
        return f"{stored / total:.0%} of the bytes of its matrices ({stored / MB:.3g} MB): {self._kinds(total)}"

    def _sizes(self) -> tuple[int, int]:
        """Returns the bytes in the file of the layers that are decoded to floats, and of all layers."""
        reader = self._reader
        return sum(self._stored.values()), max(1, sum(map(reader.stored_bytes, range(len(reader)))))

    def _kinds(self, total: int) -> str:
        return ", ".join(f"{kind} ({size / total:.0%})" for kind, size in sorted(self._stored.items()))


def planned_share(plan: LoadPlan, reader: CheckpointReader, caller: Caller) -> FloatShare:
    """Returns the layers that will be decoded to floats, before they are loaded.

    Reads one layer of each kind, or only headers if the process loads parts of layers. Layers that the caller selected
    for decoding are not included.

    Raises:
        UnsupportedFormat: a layer cannot be packed, and it cannot be decoded or `on_unsupported` is "error".
    """
    share = FloatShare(reader)
    if reader.options.on_unsupported == "skip":
        return share
    places = [place for place in plan.places if not place.dense.endswith(EXCLUDED)]
    experts = [one for one in plan.experts.values() if not one.dense]
    indexes = [place.index for place in places] + [index for one in experts for index in one.indexes.values()]
    refused = reader.refusals(sorted(indexes), whole=not caller.parts)
    for place in places:
        if place.index in refused:
            share.add(place.index, refused[place.index].kind, _float_bytes(place.spot, caller))
        elif place.no_layer:
            share.add(place.index, type(place.spot.target.module).__name__, _float_bytes(place.spot, caller))
    for one in experts:
        for index, kind, shape in _float_experts(one, refused, caller):
            share.add(index, kind, shape.N * shape.K * (caller.dtype or shape.dtype).itemsize)
    if refused and reader.options.on_unsupported == "error":
        first = min(refused)
        way = f"{typed('on_unsupported', 'dequantize')} decodes it to floats"
        raise UnsupportedFormat(f"{refused[first].reason}; {way}; refused are {share.refusal()}")
    return share


def _float_bytes(spot: Spot, caller: Caller) -> int:
    if spot.shape is not None:
        return spot.shape.N * spot.shape.K * (caller.dtype or spot.shape.dtype).itemsize
    weight: Any = spot.target.module.weight
    return int(weight.numel() * (caller.dtype or weight.dtype).itemsize)


def _float_experts(
    experts: ExpertsPlace, refused: dict[int, Refusal], caller: Caller
) -> Iterator[tuple[int, str, LinearShape]]:
    """Yields (index, kind, shape) for each layer of the stacks that are decoded to floats.

    A stack is decoded if one of its layers cannot be packed.
    """
    every = ([*gate_up, *down] for gate_up, down in map(experts.layers.names, range(experts.layers.count)))
    for names in zip(*every, strict=True):
        indexes = {name: experts.indexes[name] for name in names if name in experts.indexes}
        kinds = [refused[index].kind for index in indexes.values() if index in refused]
        if not kinds or any(selects(caller.exclude, f"{experts.target.name}.{name}") for name in names):
            continue
        for name, index in indexes.items():
            kind = refused[index].kind if index in refused else f"experts beside {kinds[0]}"
            yield index, kind, experts.shapes[name]
