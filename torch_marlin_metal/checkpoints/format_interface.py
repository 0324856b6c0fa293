"""The classes that describe a checkpoint format. `formats/` has one file per format; `known_formats.py` lists them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.files.safetensors import TensorInfo
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight


@dataclass(frozen=True, kw_only=True)
class Format:
    """A checkpoint format, as reports and the documentation describe it.

    Attributes:
        name: short name, for `PackedWeight.source` and reports.
        title: the format's common name.
        containers: the kinds of file that hold it.
        variants: the supported variants, as (variant, weight formats) pairs.
        refused: the variants that are not supported, as (variant, reason) pairs.
    """

    name: str
    title: str
    containers: tuple[str, ...]
    variants: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...]


Read = Callable[[Layer, Settings, ReadOptions], PackedWeight]


def _own_name(checkpoint: Checkpoint, name: str, expert: int | None) -> str:
    return name if expert is None else f"{name}.{expert}"


@dataclass(frozen=True, kw_only=True)
class DirectoryFormat(Format):
    """A format of checkpoint directories: how to recognise it, and how to find and convert its layers.

    A tensor's *role* is its part in a layer, such as "scales". A layer's tensors are named `<layer>.<ending>`.

    Attributes:
        methods: the `quant_method` values of this format.
        anchors: ending -> role, for a tensor that every layer has. The tensor's name without the ending is the layer's
            name.
        roles: role -> possible endings, for the layer's other tensors.
        fields: field of `PackedWeight` -> role. An error about a field names the checkpoint's tensor with that role.
        check: raises UnsupportedFormat if layers with the settings of a checkpoint are not supported.
        read: converts one layer.
        implied: recognises checkpoints of this format whose settings name no method.
        delegate: for a format that only wraps others, returns the wrapped format.
        stacked_rank: if the anchor tensor has this rank, its first dimension counts experts, and each is a layer.
        extras: endings of tensors that belong to a layer but are not needed, such as scales of activations.
        marks: the last parts of names of tensors that only mark a file of this format.
        listed: for a format whose settings list the layers, returns their names. Only these names are layers, because
            other tensors may have names like parts of a layer.
        scaled: ending -> role, for scales beside a `weight`. They make it a packed layer, if it is not of floats and
            has no anchor.
        unscaled: dtypes of a `weight` that is a layer without scales, too: its numbers are the values.
        axes: role -> the unit of each dimension of the tensor, for reading a part of a layer: "N", "K", "N/8" and "K/8"
            (words of 8 codes, or of 4 codes of 8 bits), "G" (groups), "S" (blocks of scales with two levels), "H"
            (words of `b_high`), or "order" (one position or group per row of K). Empty if a layer can only be read as a
            whole.
        hf_name: for a format whose producer renames tensors: maps a name in the checkpoint to transformers' name. It
            takes a tensor, a layer, or a layer of a stack with its index.
        hf_values: the same for the values of a tensor outside the layers.
        joins: for the first of two stacks of a layer, returns the layer's name and the second stack's name; for the
            second stack, empty names. Roles of the second stack's tensors begin with "second ".
    """

    containers: tuple[str, ...] = ("a directory of safetensors files", "(on request) a directory of PyTorch pickles")
    methods: tuple[str, ...]
    anchors: Mapping[str, str]
    roles: Mapping[str, tuple[str, ...]]
    fields: Mapping[str, str]
    check: Callable[[Checkpoint, Settings], None]
    read: Read
    implied: Callable[[Checkpoint], bool] = lambda checkpoint: False
    delegate: "Callable[[Settings], DirectoryFormat] | None" = None
    stacked_rank: int | None = None
    extras: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    listed: Callable[[Settings], set[str]] | None = None
    scaled: Mapping[str, str] = field(default_factory=dict)
    unscaled: tuple[str, ...] = ()
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hf_name: Callable[[Checkpoint, str, int | None], str] = _own_name
    hf_values: Callable[[Checkpoint, str, Tensor], Tensor] = lambda checkpoint, name, values: values
    joins: Callable[[Checkpoint, str], tuple[str, str] | None] = lambda checkpoint, base: None

    def resolve(self, settings: Settings) -> "DirectoryFormat":
        """Returns the format of the layers: this one, or the one that it wraps."""
        return self if self.delegate is None else self.delegate(settings)

    def layers(self, checkpoint: Checkpoint) -> Iterator[Layer]:
        """Yields the layers in the order of the files."""
        places = sorted(checkpoint.tensors.values(), key=lambda info: (info.file.name, info.offset))
        scales = [info.name for info in places if "scale" in info.name]
        for info in places:
            for ending, role in self.anchors.items():
                if info.name.endswith(ending):
                    yield from self._layers_at(checkpoint, info.name.removesuffix(ending), role, info)
            for ending, role in self.scaled.items():
                base = info.name.removesuffix(ending)
                if base == info.name:
                    continue
                packed = any(base + anchor in checkpoint.tensors for anchor in self.anchors)
                if not packed and not self.is_float(checkpoint, base):
                    yield from self._layers_at(checkpoint, base, role, info)
                break
            if info.dtype in self.unscaled and len(info.shape) == 2 and info.name.endswith(".weight"):
                base = info.name.removesuffix(".weight")
                if not any(base + ending in checkpoint.tensors for ending in self.scaled):
                    self._refuse_other_scales(checkpoint, base, scales)
                    yield from self._layers_at(checkpoint, base, "weight", info)

    def _refuse_other_scales(self, checkpoint: Checkpoint, base: str, scales: Iterable[str]) -> None:
        """Refuses scales of an unknown name beside codes that would otherwise count as values."""
        for name in scales:
            rest = name.removeprefix(base)
            if name != rest and rest.startswith((".", "_")) and "scale" in rest and rest not in self.extras:
                known = " or ".join(self.scaled)
                raise checkpoint.error(name, f"the scales of {base}.weight are read under names that end in {known}")

    def is_float(self, checkpoint: Checkpoint, base: str) -> bool:
        """Returns whether a layer has quantization parameters, but a weight of floats: the producer did not pack it."""
        weight = checkpoint.tensors.get(f"{base}.weight")
        packed = any(base + anchor in checkpoint.tensors for anchor in self.anchors)
        return bool(self.scaled) and not packed and weight is not None and weight.dtype in FLOATS

    def unused(self, checkpoint: Checkpoint) -> set[str]:
        """Returns the tensors to ignore: marks, and quantization parameters of layers whose weights are floats."""
        parts = {ending for role, endings in self.roles.items() if role not in ("weight", "bias") for ending in endings}
        found = {
            info.name
            for info in checkpoint.tensors.values()
            for ending in (*parts, *self.scaled, *self.extras)
            if info.name.endswith(ending) and self.is_float(checkpoint, info.name.removesuffix(ending))
        }
        return found | {name for name in checkpoint.tensors if name.rpartition(".")[2] in self.marks}

    def _layers_at(self, checkpoint: Checkpoint, base: str, role: str, info: TensorInfo) -> Iterator[Layer]:
        roles = self._roles(checkpoint, base, role, info)
        if (joined := self.joins(checkpoint, base)) is not None:
            name, second = joined
            if name:
                ending = info.name.removeprefix(base)
                if second + ending not in checkpoint.tensors:
                    raise checkpoint.error(info.name, f"expected {second + ending} beside it")
                others = self._roles(checkpoint, second, role, checkpoint.tensors[second + ending])
                yield Layer(checkpoint, name, roles | {f"second {key}": own for key, own in others.items()})
            return
        if self.stacked_rank != len(info.shape):
            yield Layer(checkpoint, self.hf_name(checkpoint, base, None), roles)
            return
        experts = info.shape[0]
        if not 0 < experts <= info.nbytes:  # a tiny file could claim so many experts that their layers fill the memory
            raise checkpoint.error(
                info.name, f"expected experts of at least one byte, got {list(info.shape)} in {info.nbytes} bytes"
            )
        for name in roles.values():
            if checkpoint.tensors[name].shape[:1] != (experts,):
                raise checkpoint.error(name, f"expected {experts} experts, got {list(checkpoint.tensors[name].shape)}")
        for expert in range(experts):
            yield Layer(checkpoint, self.hf_name(checkpoint, base, expert), roles, expert)

    def _roles(self, checkpoint: Checkpoint, base: str, role: str, info: TensorInfo) -> dict[str, str]:
        found = {role: info.name}
        for other, endings in self.roles.items():
            for ending in endings:
                if base + ending in checkpoint.tensors:
                    found.setdefault(other, base + ending)
        found |= {ending: base + ending for ending in self.extras if base + ending in checkpoint.tensors}
        return found


def endings(*roles: str) -> dict[str, tuple[str, ...]]:
    """Returns `DirectoryFormat.roles` for tensors that are named `<layer>.<role>`."""
    return {role: (f".{role}",) for role in roles}
