"""What a format is to the rest of the package; the formats themselves are one file each, listed in `formats.py`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch_marlin_metal.convert.checkpoint import Checkpoint, Settings
from torch_marlin_metal.convert.layer import Layer
from torch_marlin_metal.convert.safetensors_file import TensorInfo
from torch_marlin_metal.packed_weight import PackedWeight

OnUnsupported = Literal["error", "dequantize", "skip"]
ZerosRule = Literal["word", "masked", "unmasked"]


@dataclass(frozen=True)
class Options:
    """What the caller decides.

    Attributes:
        on_unsupported: what happens to a layer that cannot be represented: "error", "dequantize" or "skip".
        allow_pickle: read PyTorch pickles, by `torch.load(weights_only=True)`.
        gptq_zeros_rule: how GPTQ v1 zero points are read where a raw nibble is 15: "word", "masked" or "unmasked".
        gptq_version: 1 or 2, in place of what the GPTQ settings say.
        gguf_names: "gguf" for the file's own tensor names, "hf" for transformers' names with the row order that
            transformers expects.
    """

    on_unsupported: OnUnsupported = "error"
    allow_pickle: bool = False
    gptq_zeros_rule: ZerosRule = "word"
    gptq_version: int | None = None
    gguf_names: Literal["gguf", "hf"] = "gguf"


@dataclass(frozen=True, kw_only=True)
class Format:
    """What a container of 4-bit layers is, for reports and the documentation.

    Attributes:
        name: short name, for `PackedWeight.source` and reports.
        title: what people call it.
        containers: what kind of file it comes in.
        variants: what is read, as (variant, weight formats) pairs.
        refused: what is not read, as (what, reason) pairs.
    """

    name: str
    title: str
    containers: tuple[str, ...]
    variants: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...]


Read = Callable[[Layer, Settings, Options], PackedWeight]


@dataclass(frozen=True, kw_only=True)
class DirectoryFormat(Format):
    """A format of checkpoint directories: how it is recognised, how its layers are found and converted.

    Attributes:
        methods: the `quant_method` values that announce it.
        anchors: endings of tensor names that mark a layer, each with its role; what stands before is the layer's name.
        roles: role -> endings that name it, for the layer's other tensors.
        fields: field of `PackedWeight` -> role, so that an error names the tensor.
        check: refuses a whole checkpoint by its settings.
        read: converts one layer.
        implied: recognises settings that name no method.
        delegate: the format that holds the layers, for a method that only wraps others.
        stacked_rank: rank of the anchor tensor at which its first dimension counts experts, each a layer of its own.
        extras: endings of tensors that belong to a layer and are not needed, such as scales of activations.
        foreign: endings of tensors that mark a layer quantized in a way that is not read, each with the reason.
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
    foreign: Mapping[str, str] = field(default_factory=dict)

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
            for ending, reason in self.foreign.items():
                base = info.name.removesuffix(ending)
                if base != info.name and not any(base + anchor in checkpoint.tensors for anchor in self.anchors):
                    yield Layer(checkpoint, base, self._roles(checkpoint, base, ending[1:], info), refused=reason)

    def _layers_at(self, checkpoint: Checkpoint, base: str, role: str, info: TensorInfo) -> Iterator[Layer]:
        roles = self._roles(checkpoint, base, role, info)
        if self.stacked_rank != len(info.shape):
            yield Layer(checkpoint, base, roles)
            return
        experts = info.shape[0]
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
