"""The exceptions that reading a checkpoint can raise: `CheckpointError` and its subclasses."""

from collections.abc import Callable

from torch_marlin_metal.checkpoints.float_rows import FloatRows


class CheckpointError(ValueError):
    """A checkpoint is damaged or contradicts itself; the message names the file and the tensor or key."""


class NotQuantized(CheckpointError):
    """A checkpoint directory has no quantization settings: its weights are floats, or the settings were lost."""


class NothingPacked(CheckpointError):
    """A checkpoint has quantization settings, but no tensor of a quantized layer."""


class UnsupportedFormat(CheckpointError):
    """A checkpoint, or one layer of it, cannot be represented by the operators without loss.

    Attributes:
        dequantize: a function that returns the layer's weight as floats; None if the weight cannot be decoded.
        kind: the common property of layers with this reason, such as "Q6_K".
    """

    def __init__(self, message: str, dequantize: Callable[[], FloatRows] | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.dequantize = dequantize
        self.kind = kind


class UnknownArchitecture(UnsupportedFormat):
    """A GGUF file has an architecture without a table of transformers' names."""
