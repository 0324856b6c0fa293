"""The tensors of one layer of a checkpoint, by role."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.safetensors import DTYPES, FLOAT8, Slice, TensorInfo
from torch_marlin_metal.checkpoints.float_rows import FloatRows

FLOATS = ("F16", "BF16", "F32")


@dataclass(slots=True)
class Layer:
    """The tensors of one layer.

    Attributes:
        checkpoint: the checkpoint that contains the tensors.
        name: the module's name, without ".weight".
        roles: role, for example "scales" -> name of the tensor in the checkpoint.
        expert: the layer's index along the first dimension of each tensor, if the tensors are stacks of experts.
        parts: role -> the slice of the tensor to read. Empty unless only one process's part of the layer is read.
    """

    checkpoint: Checkpoint
    name: str
    roles: dict[str, str]
    expert: int | None = None
    parts: Mapping[str, Slice] = field(default_factory=dict)

    def __contains__(self, role: str) -> bool:
        return role in self.roles

    def _info(self, role: str) -> TensorInfo:
        if role not in self.roles:
            present = ", ".join(sorted(self.roles))
            raise CheckpointError(f"{self.file}: layer {self.name!r}: expected a tensor {role}, found only {present}")
        return self.checkpoint.tensors[self.roles[role]]

    @property
    def experts(self) -> int:
        """Returns the number of layers in the tensors."""
        return 1 if self.expert is None else self.checkpoint.tensors[next(iter(self.roles.values()))].shape[0]

    def nbytes(self, role: str) -> int:
        """Returns the tensor's size in the file, in bytes."""
        return self._info(role).nbytes

    def shape(self, role: str) -> tuple[int, ...]:
        """Returns the shape of the tensor that `read` returns."""
        shape = self._info(role).torch_shape
        shape = shape if self.expert is None else shape[1:]
        if (part := self.parts.get(role)) is None:
            return shape
        return (*shape[: part.axis], part.stop - part.start, *shape[part.axis + 1 :])

    def dtype(self, role: str) -> str:
        """Returns the name of the dtype in the file, a key of `DTYPES`."""
        return self._info(role).dtype

    def expect(self, role: str, dtypes: Sequence[str], *sizes: int | None) -> tuple[int, ...]:
        """Checks a tensor's dtype and shape in the header, before the tensor is read.

        A size of None allows any positive size.

        Returns:
            The shape.
        """
        shape = self.shape(role)
        if self.dtype(role) not in dtypes:
            raise self.error(role, f"expected dtype {' or '.join(dtypes)}, got {self.dtype(role)}")
        fits = len(shape) == len(sizes) and all(
            got > 0 and want in (None, got) for want, got in zip(sizes, shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in sizes)
            raise self.error(role, f"expected shape [{wanted}], got {list(shape)}")
        return shape

    def read(self, role: str) -> Tensor:
        return self.checkpoint.read(self._info(role).name, self.expert, self.parts.get(role))

    def bias(self, N: int | None = None) -> Tensor | None:
        """Returns the layer's bias `[N]` after checks, or None. A bias of 8-bit floats is converted to bf16."""
        if "bias" not in self.roles:
            return None
        self.expect("bias", (*FLOATS, *FLOAT8), N)
        kind = FLOAT8.get(self.dtype("bias"))
        return self.read("bias") if kind is None else self.read("bias").view(kind).bfloat16()

    def scalar(self, role: str) -> float:
        """Returns the only element of a tensor."""
        if self.dtype(role) not in (*FLOATS, "U8", "I32", "I64", "BOOL") or self.read(role).numel() != 1:
            raise self.error(role, f"expected a single number, got {self.dtype(role)} {list(self.shape(role))}")
        value = float(self.read(role).reshape(()).item())
        if not isfinite(value):
            raise self.error(role, f"expected a finite number, got {value}")
        return value

    @property
    def file(self) -> str:
        """Returns the path of the file that holds the layer's first tensor."""
        return str(self.checkpoint.tensors[next(iter(self.roles.values()))].file)

    def headers(self) -> "Layer":
        """Returns a copy of the layer whose `read` returns tensors on the meta device, without data."""
        return _Headers(self.checkpoint, self.name, self.roles, self.expert, self.parts)

    def error(self, role: str, message: str) -> CheckpointError:
        """Makes an error whose message names the role's tensor and its file."""
        return self.checkpoint.error(self.roles[role], message)

    def unsupported(self, reason: str, dequantize: Callable[[], FloatRows] | None = None) -> UnsupportedFormat:
        """Makes an error that refuses the layer. `dequantize` decodes the layer for callers that accept floats."""
        return UnsupportedFormat(f"{self.file}: layer {self.name!r}: {reason}", dequantize, reason)


class _Headers(Layer):
    __slots__ = ()

    def read(self, role: str) -> Tensor:
        return torch.empty(self.shape(role), dtype=DTYPES[self.dtype(role)][1], device="meta")
