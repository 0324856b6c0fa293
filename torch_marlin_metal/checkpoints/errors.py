"""The exceptions of checkpoint readers: `CheckpointError` and its subclasses."""

from collections.abc import Callable

from torch_marlin_metal.checkpoints.float_rows import FloatRows


class CheckpointError(ValueError):
    """A checkpoint is damaged or contradicts itself. The message names the file and the tensor or key."""


class NotQuantized(CheckpointError):
    """A checkpoint directory has no quantization settings: its weights are floats, or the settings were lost."""


class NothingPacked(CheckpointError):
    """A checkpoint has quantization settings but no tensor of a quantized layer."""


class UnsupportedFormat(CheckpointError):
    """The operators cannot represent a checkpoint, or one of its layers, without loss.

    Attributes:
        dequantize: a function that returns the layer's weight as floats, or None if the weight cannot be decoded.
        kind: what all layers refused for this reason have in common, for example the type "Q6_K".
    """

    def __init__(self, message: str, dequantize: Callable[[], FloatRows] | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.dequantize = dequantize
        self.kind = kind


class UnknownArchitecture(UnsupportedFormat):
    """A GGUF file has an architecture for which there is no table of transformers' names."""
