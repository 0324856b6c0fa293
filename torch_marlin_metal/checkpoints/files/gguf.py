"""Reads and checks the metadata and the tensor directory of GGUF files.

All counts and offsets are compared with the size of the file before use. The parser of the `gguf` package trusts the
counts in a file, so a damaged file can make it loop for hours. This parser reads at least one byte for each element, so
the size of the file bounds its run time. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch import Tensor

from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.regular import check_downloaded, regular_file
from torch_marlin_metal.checkpoints.files.safetensors import Slice, TensorInfo, read_tensor

# type number -> (name, elements in a block, bytes of a block). Source: ggml.h and gguf.constants 0.19.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
MAX_NESTING = 4
MAX_ARRAY = 1 << 16  # longer arrays are skipped: readers need only arrays with an element for each layer
MAX_STRING = 1 << 20  # longer strings, such as chat templates, are skipped: readers need only names and settings
MAX_RANK = 5  # GGML_MAX_DIMS is 4, but files of video models have convolutions of rank 5
DEFAULT_ALIGNMENT = 32
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file. `shape` is in PyTorch's order, so K is last."""

    name: str
    file: Path
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def where(self) -> str:
        """Returns the tensor's file and name for error messages."""
        return f"{self.file}: tensor {self.name!r}"

    @property
    def is_plain(self) -> bool:
        """Returns True if the tensor holds plain numbers, False if it holds blocks of codes."""
        return self.type_name in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")

    def read(self, expert: int | None = None, part: Slice | None = None) -> Tensor:
        """Reads the tensor: plain numbers in their dtype and shape, blocks as uint8 `[..., bytes of a row]`.

        The arguments are those of `read_tensor`.
        """
        shape = self.shape if self.is_plain else (*self.shape[:-1], self.nbytes // prod(self.shape[:-1]))
        info = TensorInfo(
            self.name, self.file, self.type_name if self.is_plain else "U8", shape, self.offset, self.nbytes
        )
        return read_tensor(info, expert, part)


@dataclass(frozen=True)
class SkippedArray:
    """A metadata array that is not stored: an array of strings or of arrays, or one longer than `MAX_ARRAY`."""

    count: int


class _Header:
    """Reads the start of a file. Raises an error instead of reading past the end."""

    def __init__(self, file: Path, stream: BinaryIO, size: int) -> None:
        self.file, self.stream, self.size = file, stream, size
        self.position = 0  # counted here, because stream.tell() costs a system call

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {message}")

    def _advance(self, count: int) -> None:
        if count > self.size - self.position:
            raise self.fail(f"truncated: {count} bytes wanted at {self.position}, the file has {self.size}")
        self.position += count

    def take(self, count: int) -> bytes:
        self._advance(count)
        return self.stream.read(count)

    def skip(self, count: int) -> None:
        self._advance(count)
        self.stream.seek(count, 1)

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        if length > MAX_STRING:
            self.skip(length)
            return ""
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"a string before byte {self.position} is not UTF-8") from error

    def value(self, kind: int, nesting: int = 0) -> Any:
        """Reads a metadata value. A short array of numbers is a view of its bytes."""
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or nesting == MAX_NESTING:
            raise self.fail(f"unknown metadata type {kind} before byte {self.position}")
        element, count = self.scalar("<I"), self.scalar("<Q")
        if element in SCALARS:
            code = SCALARS[element][1]
            if count <= MAX_ARRAY:
                return memoryview(self.take(count * struct.calcsize(code))).cast(cast(Any, code))
            self.skip(count * struct.calcsize(code))
        elif element == STRING:
            for _ in range(count):  # the size of the file bounds the loop: each element has at least 8 bytes
                self.skip(int.from_bytes(self.take(8), "little"))
        else:
            for _ in range(count):
                self.value(element, nesting + 1)
        return SkippedArray(count)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Reads the metadata and the tensor directory of a GGUF file. For a split model, reads those of all parts.

    Raises:
        CheckpointError: a file is missing, truncated or contradicts itself.
        UnsupportedFormat: the version or a tensor type is unknown.
    """
    metadata, tensors = _read_one(path)
    count = metadata.get("split.count", 1)
    if type(count) is not int or count <= 1:
        return metadata, tensors
    named = SPLIT_NAME.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise CheckpointError(
            f"{path}: one of {count} parts, so expected a name that ends in -00001-of-{count:05d}.gguf"
        )
    for part in range(1, count + 1):
        sibling = path.with_name(f"{named[1]}-{part:05d}-of-{count:05d}.gguf")
        if sibling == path:
            continue
        if not sibling.exists():
            raise CheckpointError(f"{path}: part {sibling.name} is missing")
        other_metadata, others = _read_one(regular_file(sibling))
        for name, tensor in others.items():
            if name in tensors:
                raise CheckpointError(f"{sibling}: tensor {name!r} is also in {tensors[name].file}")
            tensors[name] = tensor
        metadata = other_metadata | metadata
    return metadata, tensors


def _read_one(file: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    check_downloaded(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            return _parse(_Header(file, stream, size))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error


def _parse(header: _Header) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if header.size < 24 or header.take(4) != b"GGUF":
        raise header.fail("not a GGUF file (no magic bytes GGUF)")
    version = header.scalar("<I")
    if version not in (2, 3):
        raise UnsupportedFormat(f"{header.file}: GGUF version {version} is not read; known: 2, 3 (little-endian)")
    tensor_count, metadata_count = header.scalar("<Q"), header.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = header.string()
        if key in metadata:
            raise header.fail(f"metadata key {key!r} occurs twice")
        metadata[key] = header.value(header.scalar("<I"))
    entries = [_entry(header) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise header.fail(f"general.alignment: expected a power of two, got {alignment!r}")
    start = -(-header.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, type_name, shape, offset, nbytes in entries:
        if name in tensors:
            raise header.fail(f"tensor {name!r} occurs twice")
        if offset % alignment or start + offset + nbytes > header.size:
            raise header.fail(
                f"tensor {name!r}: bytes {start + offset}..{start + offset + nbytes} are not aligned, or beyond the "
                f"file of {header.size} bytes"
            )
        tensors[name] = GgufTensor(name, header.file, type_name, shape, start + offset, nbytes)
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise header.fail(f"tensor {tensor.name!r} overlaps {before!r}")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    return metadata, tensors


def _entry(header: _Header) -> tuple[str, str, tuple[int, ...], int, int]:
    name, rank = header.string(), header.scalar("<I")
    if not 1 <= rank <= MAX_RANK:
        raise header.fail(f"tensor {name!r}: expected 1 to {MAX_RANK} dimensions, got {rank}")
    sizes = [header.scalar("<Q") for _ in range(rank)]
    kind, offset = header.scalar("<I"), header.scalar("<Q")
    if kind not in GGML_TYPES:
        raise UnsupportedFormat(f"{header.file}: tensor {name!r}: unknown type number {kind}")
    type_name, block, block_bytes = GGML_TYPES[kind]
    if not all(sizes) or sizes[0] % block:
        raise header.fail(f"tensor {name!r}: shape {sizes} does not consist of {type_name} blocks of {block}")
    return name, type_name, tuple(reversed(sizes)), offset, prod(sizes) // block * block_bytes
