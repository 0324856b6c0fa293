"""What a format is to the rest of the package; the formats themselves are one file each, listed in `formats.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch_marlin_metal.convert.checkpoint import Checkpoint, Settings
from torch_marlin_metal.convert.layer import Layer
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


Read = Callable[[Layer, Settings, Options], PackedWeight]


@dataclass(frozen=True)
class Format:
    """A container of 4-bit layers in a checkpoint directory.

    Attributes:
        name: short name, for `PackedWeight.source` and reports.
        title: what people call it.
        methods: the `quant_method` values that announce it.
        variants: what is read, as (variant, weight formats) pairs.
        refused: what is not read, as (what, reason) pairs.
        anchors: endings of the tensor names that mark a layer; the layer's name is what stands before.
        roles: role -> ending, for the layer's other tensors.
        fields: field of `PackedWeight` -> role, so that an error names the tensor.
        check: refuses a whole checkpoint by its settings.
        read: converts one layer.
        implied: recognises settings that name no method.
        delegate: the format that holds the layers, for a method that only wraps others.
    """

    name: str
    title: str
    methods: tuple[str, ...]
    variants: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...]
    anchors: tuple[str, ...]
    roles: dict[str, str]
    fields: dict[str, str]
    check: Callable[[Checkpoint, Settings], None]
    read: Read
    implied: Callable[[Checkpoint], bool] = lambda checkpoint: False
    delegate: "Callable[[Settings], Format] | None" = None
    containers: tuple[str, ...] = field(default=("safetensors directory", "PyTorch pickles on request"))

    def resolve(self, settings: Settings) -> "Format":
        """Returns the format that really holds the layers."""
        return self if self.delegate is None else self.delegate(settings)

    def layers(self, checkpoint: Checkpoint) -> Iterator[Layer]:
        """Yields the layers in the order in which they lie in the files."""
        places = sorted(checkpoint.tensors.values(), key=lambda info: (info.file.name, info.offset))
        for info in places:
            for anchor in self.anchors:
                if info.name.endswith(anchor):
                    base = info.name.removesuffix(anchor)
                    roles = {anchor.rsplit(".", 1)[-1]: info.name}
                    roles |= {r: base + e for r, e in self.roles.items() if base + e in checkpoint.tensors}
                    yield Layer(checkpoint, base, roles)
