"""One layer of a checkpoint, which gives readers its tensors by role, and helpers to convert codes and scales."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.safetensors import Slice, TensorInfo
from torch_marlin_metal.checkpoints.words import transposed
from torch_marlin_metal.formats import GROUP_SIZES

FLOATS = ("F16", "BF16", "F32")
# Bits of a code -> bits of its planes, the low ones first, in GPTQModel's format "gptq_p".
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
PIECE = 1 << 20  # codes that are unpacked at a time


@dataclass(slots=True)
class Layer:
    """The tensors of one layer.

    Attributes:
        checkpoint: the checkpoint that holds them.
        name: the module's name, without ".weight".
        roles: role ("scales") -> name of the tensor in the checkpoint.
        expert: for a stack of experts, this layer's index along the first dimension of every tensor.
        refused: for a layer whose quantization is not supported, the reason.
        parts: for one process's part of a layer, role -> the part of the tensor that it needs.
    """

    checkpoint: Checkpoint
    name: str
    roles: dict[str, str]
    expert: int | None = None
    refused: str = ""
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
        """Returns the number of layers that the tensors hold."""
        return 1 if self.expert is None else self.checkpoint.tensors[next(iter(self.roles.values()))].shape[0]

    def nbytes(self, role: str) -> int:
        """Returns the tensor's size in the file."""
        return self._info(role).nbytes

    def shape(self, role: str) -> tuple[int, ...]:
        """Returns the shape of the tensor that `read` returns."""
        shape = self._info(role).torch_shape
        shape = shape if self.expert is None else shape[1:]
        if (part := self.parts.get(role)) is None:
            return shape
        return (*shape[: part.axis], part.stop - part.start, *shape[part.axis + 1 :])

    def dtype(self, role: str) -> str:
        """Returns the dtype's name in the file, a key of `DTYPES`."""
        return self._info(role).dtype

    def expect(self, role: str, dtypes: Sequence[str], *sizes: int | None) -> tuple[int, ...]:
        """Checks a tensor's dtype and shape in the header, before the tensor is read.

        None as a size allows any positive size.

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
        """Reads the tensor from the file."""
        return self.checkpoint.read(self._info(role).name, self.expert, self.parts.get(role))

    def bias(self, N: int) -> Tensor | None:
        """Returns the linear layer's bias `[N]`, checked, or None."""
        if "bias" not in self.roles:
            return None
        self.expect("bias", FLOATS, N)
        return self.read("bias")

    def scalar(self, role: str) -> float:
        """Returns the value of a tensor of one element."""
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

    def error(self, role: str, message: str) -> CheckpointError:
        """Makes the error that names the role's tensor and its file."""
        return self.checkpoint.error(self.roles[role], message)

    def unsupported(self, reason: str, dequantize: Callable[[], Tensor] | None = None) -> UnsupportedFormat:
        """Makes the error that refuses this layer; `dequantize` decodes the layer for callers who want floats."""
        kind = reason.removesuffix(" are not 4 bit wide")
        return UnsupportedFormat(f"{self.file}: layer {self.name!r}: {reason}", dequantize, kind)


def fit_groups(K: int, group_size: int, *grouped: Tensor) -> tuple[int, list[Tensor]] | None:
    """Converts tensors with one row per group to a group size that the operators support, without loss.

    If the producer's group size is not supported, each group is split into equal parts that repeat its values.

    Args:
        K: rows of the weight.
        group_size: the producer's group size; K or more means one group.
        grouped: the tensors to convert, each `[ceil(K / group_size), N]`.

    Returns:
        The new group size and the tensors with one row per new group; None if no supported size divides the producer's.
    """
    if group_size >= K:
        return K, list(grouped)
    size = next((size for size in sorted(GROUP_SIZES, reverse=True) if group_size % size == 0), None)
    if size is None:
        return None
    if size == group_size:
        return size, list(grouped)
    groups = -(-K // size)
    return size, [tensor.repeat_interleave(group_size // size, 0)[:groups] for tensor in grouped]


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks `count` codes of any width along the first dimension of int32 words; a code may straddle two words."""
    first = torch.arange(count, device="cpu") * bits
    low, shift = first // 32, (first % 32).unsqueeze(1)
    wide = words.long() & 0xFFFFFFFF
    next_word = wide[(low + 1).clamp(max=words.shape[0] - 1)]
    return ((wide[low] >> shift) | (next_word << (32 - shift))) & ((1 << bits) - 1)


def unpack_planes(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks codes that lie in planes: of 32 codes, words with their low bits come first, then words with the next.

    Args:
        words: int32 `[count * bits / 32, N]`.
        bits: 2 to 8, the bits of a code.
        count: a multiple of 32.
    """
    blocks, first = words.reshape(-1, bits, words.shape[1]), 0
    codes = torch.zeros((), dtype=torch.int64, device="cpu")
    for width in PLANES[bits]:
        plane = blocks[:, first : first + width].reshape(-1, words.shape[1])
        codes = codes | (unpack(plane, width, count) << first)
        first += width
    return codes


def in_four_bits(words: Tensor, count: int, codes_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Converts words with codes of any layout to int32 `[K/8, N]`, a piece at a time, since codes need more memory.

    Args:
        words: `[W, N]`.
        count: K, the codes of a column; a multiple of 8.
        codes_of: returns the codes `[K, n]`, 0 to 15, of some columns of the words.
    """
    pieces = torch.split(words, max(1, PIECE // count), dim=1)
    return torch.cat([words_of_codes(codes_of(piece).t().to(torch.uint8)) for piece in pieces], dim=1)


def spread(grouped: Tensor, K: int, group_size: int) -> Tensor:
    """Expands values per group `[G, N]` to `[K, N]`: repeats each row `group_size` times and cuts off after K rows."""
    return grouped.repeat_interleave(group_size, 0)[:K]


def constant(tensor: Tensor, value: int) -> bool:
    """Returns whether every element is `value`."""
    return bool((tensor == value).all())


def as_words(packed: Tensor) -> Tensor:
    """Converts bytes `[N, K/2]` or words `[N, K/8]`, lowest k in the lowest nibble, to int32 `[K/8, N]`."""
    return transposed(packed.contiguous().view(torch.int32))


def words_of_codes(codes: Tensor) -> Tensor:
    """Packs uint8 codes `[N, K]` into int32 `[K/8, N]`."""
    return as_words(codes[:, 0::2] | (codes[:, 1::2] << 4))


def swap_nibbles(packed: Tensor) -> Tensor:
    """Swaps the two codes of every byte, for producers that store the even k in the high nibble."""
    return (packed << 4) | (packed >> 4)
