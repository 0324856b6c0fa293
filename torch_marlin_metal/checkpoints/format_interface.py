"""The classes that describe checkpoint formats. `formats/` has a file for each format, `known_formats.py` a list."""

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
    """The description of a checkpoint format for reports and the documentation.

    Attributes:
        name: short name, for `PackedWeight.source` and reports.
        title: the format's common name.
        containers: the kinds of file that can contain the format.
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
    """A format of checkpoint directories: how to recognize the format, and how to find and convert its layers.

    A tensor's *role* is its function in a layer, for example "scales". A layer's tensors are named `<layer>.<ending>`.

    Attributes:
        methods: the `quant_method` values of this format.
        anchors: ending -> role, for the tensor that every layer has. Its name without the ending is the layer's name.
        roles: role -> possible endings, for the layer's other tensors.
        fields: field of `PackedWeight` -> role, where the names differ. An error about a field names the tensor with
            this role.
        check: raises UnsupportedFormat if the settings of a checkpoint describe layers that are not supported.
        read: converts one layer.
        implied: recognizes checkpoints of this format whose settings do not name a method.
        delegate: returns the wrapped format, for a format that only wraps others.
        stacked_rank: rank of an anchor tensor that stacks experts along its first dimension. Each expert is a layer.
        extras: endings of tensors that belong to a layer but are ignored, for example scales of activations.
        marks: the last part of the names of tensors that only mark a file as one of this format.
        listed: returns the layers' names, for a format whose settings list them. All other names are not layers, even
            if a tensor is named like a part of a layer.
        scaled: ending -> role, for scales next to a `weight`. Such a layer is packed if `weight` is not floating point
            and no tensor has an ending of `anchors`.
        unscaled: dtypes of a `weight` that is a layer even without scales, because its elements are the values.
        axes: what is needed to read a part of a layer: role -> the unit of each dimension of the tensor. Empty if a
            layer can only be read in full. The units are:

            - "N" and "K": columns and rows of the weight.
            - "N/8" and "K/8": words of 8 codes, or of 4 codes of 8 bits.
            - "G": groups.
            - "S": blocks of scales with two levels.
            - "H": words of `b_high`.
            - "order": one position or group per row of K.
        hf_name: maps a name in the checkpoint to transformers' name, for a format whose producer renames tensors. The
            name may be that of a tensor, of a layer, or of a layer of a stack with its index.
        hf_values: maps the values of a tensor outside the layers to transformers' values.
        joins: for a format that stores one layer as two stacks. For the first stack, returns the layer's name and the
            name of the second stack. For the second stack, returns empty names. Roles of the second stack's tensors
            start with "second ".
    """

    containers: tuple[str, ...] = (
        "a directory of safetensors files",
        "(with `allow_pickle=True`) a directory of PyTorch pickles",
    )
    methods: tuple[str, ...]
    anchors: Mapping[str, str]
    roles: Mapping[str, tuple[str, ...]]
    fields: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Checkpoint, Settings], None] = lambda checkpoint, settings: None
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
        """Returns the format of the layers: the wrapped format if there is one, else this format."""
        return self if self.delegate is None else self.delegate(settings)

    def layers(self, checkpoint: Checkpoint) -> Iterator[Layer]:
        """Yields the layers in the order of the files."""
        places = checkpoint.in_order()
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
        """Raises an error for a scale with an unknown name. Without its scale, a code would be taken for a value."""
        for name in scales:
            rest = name.removeprefix(base)
            if name != rest and rest.startswith((".", "_")) and "scale" in rest and rest not in self.extras:
                known = " or ".join(self.scaled)
                raise checkpoint.error(name, f"the scales of {base}.weight are read under names that end in {known}")

    def is_float(self, checkpoint: Checkpoint, base: str) -> bool:
        """Returns True if the producer left a layer in floats although it has quantization parameters."""
        weight = checkpoint.tensors.get(f"{base}.weight")
        packed = any(base + anchor in checkpoint.tensors for anchor in self.anchors)
        return bool(self.scaled) and not packed and weight is not None and weight.dtype in FLOATS

    def unused(self, checkpoint: Checkpoint) -> set[str]:
        """Returns tensors to ignore: marks, and the quantization parameters of layers in floats."""
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
        if not 0 < experts <= info.nbytes:  # a tiny file could claim so many experts that their entries fill the memory
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
