"""Safetensors files: checks the header before use, and reads single tensors.

This module parses the header once and reads each tensor with one `readinto`. It replaces the safetensors library for
two reasons. The library maps complete files into memory, so the resident size of the process grows with the file. The
library's errors do not name the tensor. Format: https://github.com/huggingface/safetensors#format.
"""

import io
import json
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.huge_pages import prefer_huge_pages

# For each dtype name of the format: the bits of an element, and the torch dtype that stores the elements. Not every
# backend has float8 and unsigned types. Float8 is therefore stored in uint8, and U16, U32 and U64 in the signed type of
# the same width. F4 packs two elements in a byte. If several names share a torch dtype, the writer uses the first name.
DTYPES: dict[str, tuple[int, torch.dtype]] = {
    "BOOL": (8, torch.bool),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "F8_E4M3": (8, torch.uint8),
    "F8_E5M2": (8, torch.uint8),
    "F8_E8M0": (8, torch.uint8),
    "F4": (4, torch.uint8),
    "I16": (16, torch.int16),
    "U16": (16, torch.int16),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "I32": (32, torch.int32),
    "U32": (32, torch.int32),
    "F32": (32, torch.float32),
    "I64": (64, torch.int64),
    "U64": (64, torch.int64),
    "F64": (64, torch.float64),
    "C64": (64, torch.complex64),
}
# The torch types of the 8-bit floats that `DTYPES` stores in uint8.
FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
MAX_HEADER = 100_000_000  # the reference implementation's limit
MAX_RANK = 16
MAX_ELEMENTS = 1 << 59  # with more elements, strides in bits would exceed 64-bit integers
POOLED_BYTES, MAX_POOL_BYTES = 1 << 20, 1 << 26


# A header has a `TensorInfo` for each entry. A named tuple is created five times as fast as a frozen dataclass.
class TensorInfo(NamedTuple):
    """The location of one tensor: `nbytes` bytes at `offset` of `file`. `dtype` is a key of `DTYPES`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """Returns the shape of the tensor that `read_tensor` returns: F4 halves the last dimension."""
        return self.shape if self.dtype != "F4" else (*self.shape[:-1], self.shape[-1] // 2)


def parse_json(file: Path, text: bytes) -> Any:
    """Parses untrusted JSON. Raises a CheckpointError for every failure, also for deep nesting and repeated keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{file}: the key {key!r} occurs twice")
        return values

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also an integer with too many digits for Python
        raise CheckpointError(f"{file}: not valid JSON ({error})") from error


def read_header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Reads and checks the header of a safetensors file.

    Returns:
        The tensors by name, and the file's own metadata.

    Raises:
        CheckpointError: the file is truncated; a header entry is malformed; a shape disagrees with its bytes; or
            tensors overlap, leave a hole or extend beyond the file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(f"{file}: not a safetensors file, or truncated: {size} bytes, header of {length}")
            header = parse_json(file, stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: expected a JSON object as header, got {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: expected __metadata__ to map strings to strings")

    start = 8 + length
    tensors = {name: _entry(file, name, entry, start, size) for name, entry in header.items()}
    end = start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            fault = "overlaps its neighbour" if info.offset < end else "leaves a hole before it"
            raise CheckpointError(f"{file}: tensor {info.name!r}: {fault} (data_offsets)")
        end = info.offset + info.nbytes
    if end != size:
        raise CheckpointError(f"{file}: the tensors end at byte {end}, the file at {size}")
    return tensors, metadata


def _entry(file: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    def fail(message: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name!r}: {message}")

    if not isinstance(entry, dict):
        raise fail(f"expected an object in the header, got {type(entry).__name__}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise fail(f"expected dtype to be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not _natural_numbers(shape) or len(shape) > MAX_RANK:
        raise fail(f"expected shape to be a list of at most {MAX_RANK} sizes, got {str(shape)[:80]}")
    if not _natural_numbers(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1]:
        raise fail(f"expected data_offsets to be two rising positions, got {str(offsets)[:80]}")
    if start + offsets[1] > size:
        raise fail(f"its data ends at byte {start + offsets[1]}, beyond the file of {size} bytes")
    bits = prod(shape) * DTYPES[dtype][0]
    if bits != 8 * (offsets[1] - offsets[0]) or (dtype == "F4" and (not shape or shape[-1] % 2)):
        raise fail(f"shape {shape} of {dtype} needs {bits} bits, data_offsets give {offsets[1] - offsets[0]} bytes")
    # If one size is 0, the file's length does not limit the other sizes.
    if not bits and prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise fail(f"expected sizes that span at most {MAX_ELEMENTS} elements, got {str(shape)[:80]}")
    return TensorInfo(name, file, dtype, tuple(shape), start + offsets[0], offsets[1] - offsets[0])


def _natural_numbers(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and (not values or (set(map(type, values)) == {int} and min(values) >= 0))


def _empty(nbytes: int) -> Tensor:
    return prefer_huge_pages(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))


_kept = threading.local()  # `streams` exists inside `keep_file_open` and holds the file that the thread read last


@contextmanager
def keep_file_open() -> Iterator[None]:
    """Inside the block, the file that this thread read last stays open. The end of the block frees the pooled memory.

    Opening a file takes a third of the time of reading a small tensor, and a mixture of experts has tens of thousands
    of small tensors.
    """
    if getattr(_kept, "streams", None) is not None:
        yield
        return
    streams: dict[Path, io.FileIO] = {}
    _kept.streams = streams
    try:
        yield
    finally:
        _kept.streams = None
        for stream in streams.values():
            stream.close()
        _blocks.free()


def _opened(file: Path) -> AbstractContextManager[io.FileIO]:
    streams: dict[Path, io.FileIO] | None = getattr(_kept, "streams", None)
    if streams is None:
        return file.open("rb", buffering=0)
    if file not in streams:
        while streams:
            streams.popitem()[1].close()
        streams[file] = file.open("rb", buffering=0)
    return nullcontext(streams[file])


class _Blocks:
    """A pool for the memory of freed large tensors. The next tensors of similar size reuse the memory.

    Fresh pages from the system cost more time than the read that fills them. With fresh pages for every tensor, copying
    a checkpoint took twice the CPU time.
    """

    def __init__(self) -> None:
        self._free: dict[int, Any] = {}  # a dict by id, whose `pop` gives a block to only one of several threads

    def take(self, nbytes: int) -> Tensor:
        """Makes an uninitialized uint8 tensor. When the tensor is freed, its memory returns to this pool."""
        fits = [key for key, free in list(self._free.items()) if nbytes <= free.nbytes <= 2 * nbytes]
        block = next((block for key in fits if (block := self._free.pop(key, None)) is not None), None)
        if block is None:
            block = _empty(nbytes).numpy()
        view = block[:nbytes]
        weakref.finalize(view, self._give_back, block).atexit = False
        return torch.from_numpy(view)

    def free(self) -> None:
        self._free.clear()

    def _give_back(self, block: Any) -> None:
        if sum(free.nbytes for free in list(self._free.values())) + block.nbytes <= MAX_POOL_BYTES:
            self._free[id(block)] = block


_blocks = _Blocks()


class Slice(NamedTuple):
    """The elements `start` to `stop` of a tensor along dimension `axis`, which is 0 or 1."""

    axis: int
    start: int
    stop: int


def read_tensor(info: TensorInfo, index: int | None = None, part: Slice | None = None) -> Tensor:
    """Reads one tensor, or a part of it, into new memory. Reads no other bytes of the file.

    Args:
        info: the location of the tensor.
        index: read only `tensor[index]` along its first dimension.
        part: read only this slice of the tensor, or of `tensor[index]`, which must have one or two dimensions.

    Raises:
        CheckpointError: the file became unreadable or shorter after its header was read, or memory for the tensor
            cannot be allocated.
    """
    shape, offset, nbytes = info.torch_shape, info.offset, info.nbytes
    if index is not None:
        nbytes //= shape[0]
        offset += index * nbytes
        shape = shape[1:]
    step, runs, run = nbytes, 1, nbytes  # read `runs` runs of `run` bytes; their starts are `step` bytes apart
    if part is not None:
        if not 0 <= part.start <= part.stop <= shape[part.axis]:
            raise CheckpointError(f"{info.file}: tensor {info.name!r}: {part} is outside of {list(shape)}")
        inner = nbytes // prod(shape[: part.axis + 1])
        runs, step = (1, nbytes) if part.axis == 0 else (shape[0], nbytes // shape[0])
        offset, run = offset + part.start * inner, (part.stop - part.start) * inner
        nbytes = runs * run
        shape = (*shape[: part.axis], part.stop - part.start, *shape[part.axis + 1 :])
    raw = allocate(info, nbytes)
    try:
        with _opened(info.file) as stream:
            view, done = memoryview(raw.numpy().data), 0
            for number in range(runs):
                stream.seek(offset + number * step)
                end = (number + 1) * run
                while done < end and (count := stream.readinto(view[done:end])):
                    done += count
                if done < end:
                    break
    except OSError as error:
        raise CheckpointError(f"{info.file}: tensor {info.name!r}: cannot be read ({error.strerror})") from error
    if done != nbytes:
        raise CheckpointError(f"{info.file}: tensor {info.name!r}: the file ends after {done} of its {nbytes} bytes")
    return as_tensor(info, raw, shape)


def allocate(info: TensorInfo, nbytes: int | None = None) -> Tensor:
    """Makes an uninitialized uint8 tensor for the bytes of a tensor, or for only `nbytes` bytes.

    Raises:
        CheckpointError: the memory cannot be allocated.
    """
    nbytes = info.nbytes if nbytes is None else nbytes
    try:
        return _blocks.take(nbytes) if nbytes >= POOLED_BYTES else _empty(nbytes)
    except (MemoryError, RuntimeError) as error:  # torch's allocator raises RuntimeError
        raise CheckpointError(f"{info.file}: tensor {info.name!r}: no memory for its {nbytes} bytes") from error


def as_tensor(info: TensorInfo, raw: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Views a tensor's bytes in its dtype and shape. `shape` replaces the shape if only a part was read."""
    return raw.view(DTYPES[info.dtype][1]).reshape(info.torch_shape if shape is None else shape)
