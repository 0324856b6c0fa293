"""The description of a checkpoint format. Each format is one file of `formats/`; `known_formats.py` lists them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint, Settings
from torch_marlin_metal.checkpoints.files.safetensors import TensorInfo
from torch_marlin_metal.checkpoints.layer import Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.packed_weight import PackedWeight


@dataclass(frozen=True, kw_only=True)
class Format:
    """A container of 4-bit layers, for reports and the documentation.

    Attributes:
        name: short name, for `PackedWeight.source` and reports.
        title: its common name.
        containers: kinds of file it comes in.
        variants: the variants that are read, as (variant, weight formats) pairs.
        refused: the variants that are refused, as (variant, reason) pairs.
    """

    name: str
    title: str
    containers: tuple[str, ...]
    variants: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...]


Read = Callable[[Layer, Settings, ReadOptions], PackedWeight]


@dataclass(frozen=True, kw_only=True)
class DirectoryFormat(Format):
    """A format of checkpoint directories: how it is recognised, how its layers are found and converted.

    Attributes:
        methods: the `quant_method` values that announce it.
        anchors: endings of tensor names that mark a layer, each with its role; the rest is the layer's name.
        roles: role -> endings that name it, for the layer's other tensors.
        fields: field of `PackedWeight` -> role, so that an error names the tensor.
        check: refuses a whole checkpoint by its settings.
        read: converts one layer.
        implied: recognises settings that name no method.
        delegate: the format that holds the layers, for a method that only wraps others.
        stacked_rank: rank of the anchor tensor at which its first dimension counts experts, each a layer of its own.
        extras: endings of tensors that belong to a layer and are not needed, such as scales of activations.
        unread: endings of tensors that mark a layer quantized in a way that is not read, each with the reason.
    """

    containers: tuple[str, ...] = ("directory of safetensors files", "directory of PyTorch pickles, on request")
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
    unread: Mapping[str, str] = field(default_factory=dict)

    def resolve(self, settings: Settings) -> "DirectoryFormat":
        """Returns the format that really holds the layers."""
        return self if self.delegate is None else self.delegate(settings)

    def layers(self, checkpoint: Checkpoint) -> Iterator[Layer]:
        """Yields the layers in the order in which they lie in the files."""
        places = sorted(checkpoint.tensors.values(), key=lambda info: (info.file.name, info.offset))
        for info in places:
            for ending, role in self.anchors.items():
                if info.name.endswith(ending):
                    yield from self._layers_at(checkpoint, info.name.removesuffix(ending), role, info)
            for ending, reason in self.unread.items():
                base = info.name.removesuffix(ending)
                if base != info.name and not any(base + anchor in checkpoint.tensors for anchor in self.anchors):
                    yield Layer(checkpoint, base, self._roles(checkpoint, base, ending[1:], info), refused=reason)

    def _layers_at(self, checkpoint: Checkpoint, base: str, role: str, info: TensorInfo) -> Iterator[Layer]:
        roles = self._roles(checkpoint, base, role, info)
        if self.stacked_rank != len(info.shape):
            yield Layer(checkpoint, base, roles)
            return
        experts = info.shape[0]
        if not 0 < experts <= info.nbytes:  # more objects than bytes: a file of no size would fill the memory
            raise checkpoint.error(
                info.name, f"expected experts of at least one byte, got {list(info.shape)} in {info.nbytes} bytes"
            )
        for name in roles.values():
            if checkpoint.tensors[name].shape[:1] != (experts,):
                raise checkpoint.error(name, f"expected {experts} experts, got {list(checkpoint.tensors[name].shape)}")
        for expert in range(experts):
            yield Layer(checkpoint, f"{base}.{expert}", roles, expert)

    def _roles(self, checkpoint: Checkpoint, base: str, role: str, info: TensorInfo) -> dict[str, str]:
        found = {role: info.name}
        for other, endings in self.roles.items():
            for ending in endings:
                if base + ending in checkpoint.tensors:
                    found.setdefault(other, base + ending)
        found |= {ending: base + ending for ending in self.extras if base + ending in checkpoint.tensors}
        return found


def endings(*roles: str) -> dict[str, tuple[str, ...]]:
    """Roles whose tensors are named `<layer>.<role>`."""
    return {role: (f".{role}",) for role in roles}
