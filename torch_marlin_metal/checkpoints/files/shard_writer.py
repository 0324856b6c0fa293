"""Writes tensors one after the other into safetensors shards, with only a few tensors in memory at a time.

A safetensors header comes before the data, but the header is known only after the last tensor. The writer therefore
reserves space for the header, writes the header when the shard is full, and pads it with spaces. Then the file gets its
final name, so a file with a final name is complete. A thread writes while the caller reads and converts the next
tensors.
"""

import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import DTYPE_NAMES
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.files.safetensors import FLOAT8

HEADER_BYTES = 1 << 18
# Bytes of one write call. For larger calls, Linux uses huge pages in its page cache, and a virtual machine may have to
# request each huge page from its host. On a Firecracker guest with Linux 6.18 and ext4, writing 2 GB took 4.4 s of CPU
# time in calls of 8 MiB, but 0.5 s in calls of this size.
WRITE_BYTES = 1 << 17
BATCH_BYTES = 1 << 18  # small tensors are queued in batches, because queueing one costs more than writing it
MAX_PENDING_BYTES = 1 << 25  # bytes that may wait in the queue while the next layer is converted
FLOAT8_NAMES = {dtype: name for name, dtype in FLOAT8.items()}
ENTRY_BYTES = 160  # upper bound for the bytes of a header entry, without the name and the digits of the shape


def _entry_bytes(name: str) -> int:
    return len(json.dumps(name)) + ENTRY_BYTES


class ShardWriter:
    """The shard that is being written in a directory.

    Args:
        directory: the directory of the shards.
        name: the shard's final name.

    Attributes:
        size: the bytes of the tensors added so far.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self.names: list[str] = []
        self._partial = directory / f".{name}.tmp"
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.size = 0
        self._header_size = 64
        try:
            # Unbuffered: closing a buffered stream would repeat a failed write.
            self._stream: RawIOBase = cast(RawIOBase, self._partial.open("wb", buffering=0))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written ({error.strerror})") from error
        self._stream.seek(8 + HEADER_BYTES)
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._pending_bytes = 0
        self._batch: list[Tensor] = []
        self._batch_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def has_room(self, names: list[str]) -> bool:
        """Returns True if the header has space for entries of these tensors."""
        return self._header_size + sum(map(_entry_bytes, names)) < HEADER_BYTES

    def add(self, name: str, tensor: Tensor, dtype: str | None = None) -> None:
        """Appends a tensor.

        `dtype` names the dtype in the file. It is needed if the tensor's torch dtype is only a container for the bits.

        Raises:
            CheckpointError: the tensor, or an earlier tensor in the queue, cannot be written. For example, the disk is
                full or there is no memory to join small tensors.
            ValueError: the format does not have the dtype.
        """
        held = tensor.detach().cpu().contiguous()
        nbytes = held.numel() * held.element_size()
        dtype = dtype or DTYPE_NAMES.get(held.dtype) or FLOAT8_NAMES.get(held.dtype)
        if dtype is None:
            raise ValueError(f"tensor {name!r}: {held.dtype} has no name in a safetensors file")
        shape = list(held.shape)
        if dtype == "F4":
            shape[-1] *= 2
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self.size, self.size + nbytes]}
        self._header_size += _entry_bytes(name)
        if self._batch_bytes + nbytes > BATCH_BYTES:
            self._submit()
        if nbytes:
            self._batch.append(held)
            self._batch_bytes += nbytes
        self.size += nbytes
        self.names.append(name)

    def finish(self) -> None:
        """Writes the header and renames the complete file to its final name."""
        text = json.dumps(self._entries, separators=(",", ":")).encode().ljust(HEADER_BYTES)
        if len(text) > HEADER_BYTES:
            self.discard()
            raise CheckpointError(
                f"{self.path}: the names of its tensors do not fit into a header: {self.names[0][:80]!r}"
            )
        self._submit()
        while self._pending:
            self._wait()
        self._thread.shutdown()
        with self._discarded_on_failure():
            self._stream.seek(0)
            self._write_all(memoryview(HEADER_BYTES.to_bytes(8, "little") + text))
            self._stream.close()
            self._partial.replace(self.path)

    def _submit(self) -> None:
        """Queues the batch for the thread, and waits while too many bytes are queued."""
        if self._batch:
            self._pending.append((self._batch_bytes, self._thread.submit(self._write, self._batch)))
            self._pending_bytes += self._batch_bytes
            self._batch, self._batch_bytes = [], 0
        while len(self._pending) > 1 and self._pending_bytes > MAX_PENDING_BYTES:
            self._wait()

    def _write(self, tensors: list[Tensor]) -> None:
        pieces = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors]
        self._write_all(pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)))

    def _write_all(self, data: memoryview) -> None:
        while data:
            data = data[self._stream.write(data[:WRITE_BYTES]) or 0 :]

    def _wait(self) -> None:
        nbytes, written = self._pending.popleft()
        self._pending_bytes -= nbytes
        with self._discarded_on_failure():
            written.result()

    @contextmanager
    def _discarded_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (OSError, MemoryError) as error:
            self.discard()
            reason = error.strerror if isinstance(error, OSError) else "no memory"
            raise CheckpointError(f"{self.path}: cannot be written ({reason})") from error

    def discard(self) -> None:
        """Removes the unfinished file."""
        self._thread.shutdown(cancel_futures=True)
        self._stream.close()
        self._partial.unlink(missing_ok=True)
