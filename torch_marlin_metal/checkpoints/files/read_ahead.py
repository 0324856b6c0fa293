"""Threads that read tensors of safetensors files before the caller needs them, while Python does other work.

Each thread reads many tensors with one system call, and other threads run Python during the call. One call for each
tensor would be slow: after a call returns, its thread waits up to 5 ms for a busy thread to release the interpreter.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.files.safetensors import TensorInfo, allocate, as_tensor

THREADS, THREAD_NAME = 2, "read-ahead"
BATCH_BYTES = 1 << 23  # bytes of the tensors that one task reads
CALL_BYTES = 1 << 26  # bytes of one system call; macOS refuses calls of 2 GB
CALL_BUFFERS = 1024  # buffers of one system call: IOV_MAX of Linux and macOS

Group = Sequence[TensorInfo]
Batch = dict[int, dict[str, Tensor]]


class ReadAhead:
    """Reads groups of tensors in the given order, as far as memory allows, and returns each group once.

    Args:
        groups: number of a group -> its tensors, in the order in which the caller will take the groups.
        limit: a task starts only while the tensors that were read but not taken occupy fewer bytes than this.
    """

    def __init__(self, groups: dict[int, Group], limit: int) -> None:
        self._groups, self._limit = groups, limit
        self._batches = list(_batches(groups))
        self._batch_of = {number: index for index, batch in enumerate(self._batches) for number in batch}
        self._started: list[Future[Batch]] = []
        self._waiting = 0  # bytes of the groups that were started but not taken
        self._taken: set[int] = set()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=THREAD_NAME)
        self._start_more()

    def take(self, number: int) -> dict[str, Tensor]:
        """Returns a group's tensors by name.

        Returns an empty dict if the group was not read or if the read failed. The caller then reads the tensors itself,
        and that read raises the error of the file.
        """
        if number in self._taken or number not in self._batch_of:
            return {}
        self._taken.add(number)
        batch = self._batch_of[number]
        if batch >= len(self._started):
            return {}
        try:
            found = self._started[batch].result().pop(number)
        except (CheckpointError, MemoryError, OSError, RuntimeError):
            found = {}
        self._waiting -= _nbytes(self._groups[number])
        self._start_more()
        return found

    def close(self) -> None:
        """Frees the tensors that were not taken. Waits for the system calls in progress."""
        self._threads.shutdown(cancel_futures=True)
        self._batches.clear()
        self._started.clear()
        self._batch_of.clear()

    def _start_more(self) -> None:
        while len(self._started) < len(self._batches) and self._waiting < self._limit:
            batch = {
                number: self._groups[number]
                for number in self._batches[len(self._started)]
                if number not in self._taken
            }
            self._waiting += sum(map(_nbytes, batch.values()))
            self._started.append(self._threads.submit(_read, batch))


def _nbytes(group: Group) -> int:
    return sum(info.nbytes for info in group)


def _batches(groups: dict[int, Group]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for number, group in groups.items():
        batch.append(number)
        size += _nbytes(group)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read(groups: dict[int, Group]) -> Batch:
    """Reads the groups' tensors in the order of the files. Adjacent tensors share one system call."""
    infos = {info.name: info for group in groups.values() for info in group}
    places = sorted(infos.values(), key=lambda info: (info.file, info.offset))
    memory = {info.name: allocate(info) for info in places}
    runs: list[list[TensorInfo]] = []
    for info in places:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.file, last.offset + last.nbytes) == (info.file, info.offset):
            runs[-1].append(info)
        else:
            runs.append([info])
    stream, opened = -1, None
    try:
        for run in runs:
            if run[0].file != opened:
                if stream >= 0:
                    os.close(stream)
                stream, opened = os.open(run[0].file, os.O_RDONLY), run[0].file
            _read_run(opened, stream, run[0].offset, (memory[info.name].numpy().data for info in run if info.nbytes))
    finally:
        if stream >= 0:
            os.close(stream)
    return {
        number: {info.name: as_tensor(info, memory[info.name]) for info in group} for number, group in groups.items()
    }


def _read_run(file: Path, stream: int, offset: int, buffers: Iterable[memoryview]) -> None:
    """Fills the buffers in order with the bytes of the file from `offset` on."""
    waiting = list(buffers)[::-1]
    while waiting:
        call: list[memoryview] = []
        room = CALL_BYTES
        while waiting and room and len(call) < CALL_BUFFERS:
            buffer = waiting.pop()
            call.append(buffer[:room])
            if len(buffer) > room:
                waiting.append(buffer[room:])
            room -= len(call[-1])
        done = os.preadv(stream, call, offset)
        if not done:
            raise CheckpointError(f"{file}: the file ends at byte {offset}")
        offset += done
        for buffer in reversed(call):  # the system may read fewer bytes than requested
            waiting.append(buffer)
        while waiting and done >= len(waiting[-1]):
            done -= len(waiting.pop())
        if done:
            waiting.append(waiting.pop()[done:])
