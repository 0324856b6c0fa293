"""Writes a complete checkpoint, one layer at a time. A killed conversion can be resumed.

Files are written into `<destination>.partial`. This directory is renamed to the destination when it is complete. A
journal in the directory lists the finished shards. A later conversion with the same source and options resumes after
the last finished shard, and produces the same bytes as an uninterrupted run. Only one process at a time can write to a
destination.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.card import README, write_card
from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.exporters import EXPORTERS, Exporter
from torch_marlin_metal.checkpoints.files.regular import regular_file
from torch_marlin_metal.checkpoints.files.shard_writer import ShardWriter
from torch_marlin_metal.checkpoints.formats.native import NativeExporter
from torch_marlin_metal.checkpoints.journal import JOURNAL, Journal, open_journal, sync_files
from torch_marlin_metal.checkpoints.reader import CheckpointReader, DenseWeight
from torch_marlin_metal.checkpoints.settings import CONFIG, CONFIG_FILES, without_settings
from torch_marlin_metal.packed_weight import PackedWeight

DEFAULT_SHARD_BYTES = 1 << 29
INDEX = "model.safetensors.index.json"
# Endings of the small files that a model needs. Other files, such as weights, settings and code, are not copied.
COPIED = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken")
NOT_COPIED = (CONFIG, *CONFIG_FILES)

TARGETS: dict[str, Callable[..., Exporter]] = {"native": NativeExporter, **EXPORTERS}

Progress = Callable[[str, int, int], None]
NamedTensor = tuple[str, Tensor, str | None]
_Item = tuple[str, list[NamedTensor]]


def write_checkpoint(
    reader: CheckpointReader,
    destination: str | os.PathLike[str],
    *,
    target: str = "native",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    sync: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Writes all layers and other tensors of an opened checkpoint in this package's format or another format.

    If all layers are dequantized, the result is a checkpoint of floats without quantization settings.

    Args:
        reader: a reader from `open_reader`. Its option `on_unsupported` decides about layers that cannot be packed.
            Dequantized layers are stored as fp32 `weight`.
        destination: the directory to create, which must not exist.
        target: "native", or one of `EXPORTERS`.
        max_shard_bytes: a shard is closed before a layer that would make it larger than this.
        sync: wait until each shard is on the disk before the journal lists it, and until all files are on the disk
            before the directory is renamed. Without `sync`, a power failure may damage recently written files, as with
            `cp`.
        progress: called with (name, index, count) after each layer and each other tensor.
        **options: options of the exporter: `version` (1 or 2) for "gptq".

    Returns:
        The destination.

    Raises:
        ValueError: the target is unknown.
        FileExistsError: the destination exists, another process writes it, or `<destination>.partial` exists and is
            not an unfinished conversion.
        UnsupportedFormat: the target cannot represent a layer without loss.
        CheckpointError: the source is damaged or has changed, or a file cannot be written. Complete shards are kept for
            a later run, unless the source has changed.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32, name="up")
        >>> _ = tmm.convert.export_checkpoint([weight], "gptq", "gptq")
        >>> tmm.convert.write_checkpoint(tmm.convert.open_reader("gptq"), "native").name
        'native'
    """
    exporter_class = _exporter_class(target, TARGETS)
    files = _stats(reader.path)
    identity: dict[str, Any] = {"files": {name: [size, changed] for name, (size, changed, _) in files.items()}}
    identity |= {"options": reader.settings(), "max_shard_bytes": max_shard_bytes}
    identity |= {"target": target, "target_options": options}

    source = _Source(
        name=str(reader.path),
        items=partial(_layers_and_others, reader),
        total=lambda: len(reader) + sum(1 for _ in reader.others()),
        config=dict(reader.config) if reader.path.is_dir() else {},
        copied=_small_files(reader.path),
        unchanged=lambda: _stats(reader.path) == files,
    )
    with nullcontext() if reader.calculates else _one_thread():
        return _write(source, destination, identity, exporter_class, options, max_shard_bytes, sync, progress)


def export_checkpoint(
    weights: Iterable[PackedWeight],
    destination: str | os.PathLike[str],
    target: str,
    *,
    other_tensors: Iterable[tuple[str, Tensor]] = (),
    config: dict[str, Any] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    **options: Any,
) -> Path:
    """Writes layers from memory as a checkpoint in another program's format.

    Args:
        weights: the layers, each with its `name`. The iterable may create one layer at a time.
        destination: the directory to create, which must not exist.
        target: "gptq", "awq" (gemm) or "compressed-tensors".
        other_tensors: (name, tensor) for all other tensors of the model.
        config: the model's configuration. Its `quantization_config` is replaced.
        max_shard_bytes: a shard is closed before a layer that would make it larger than this.
        **options: options of the exporter: `version` (1 or 2) for "gptq".

    Returns:
        The destination.

    Raises:
        ValueError: the target is unknown, or there is no layer.
        FileExistsError: the destination exists.
        UnsupportedFormat: the target cannot represent a layer without loss. The destination is removed.
        CheckpointError: a file cannot be written. The destination is removed.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32, name="up")
        >>> _ = tmm.convert.export_checkpoint([weight], "for-others", "gptq")
        >>> [layer.name for layer in tmm.convert.read_layers("for-others")]
        ['up']
    """
    exporter_class = _exporter_class(target, EXPORTERS)

    def items(exporter: Exporter, start: int) -> Iterator[_Item]:
        written = 0
        for weight in weights:
            written += 1
            yield weight.name, _named(weight.name, _held(weight.validate(), exporter))
        if not written:
            raise ValueError("weights: expected at least one layer, got none")
        for name, tensor in other_tensors:
            yield name, [(name, tensor, None)]

    source = _Source("weights", items, lambda: 0, dict(config or {}), [], lambda: True)
    return _write(source, destination, None, exporter_class, options, max_shard_bytes, False, None)


@dataclass(frozen=True)
class _Source:
    """A checkpoint to write. `items` yields its layers and tensors from an index on; `total` returns their number."""

    name: str
    items: Callable[[Exporter, int], Iterator[_Item]]
    total: Callable[[], int]
    config: dict[str, Any]
    copied: list[Path]
    unchanged: Callable[[], bool]


def _exporter_class(target: str, known: Mapping[str, Callable[..., Exporter]]) -> Callable[..., Exporter]:
    if target not in known:
        raise ValueError(f"target: expected one of {', '.join(known)}, got {target!r}")
    return known[target]


def _write(
    source: _Source,
    destination: str | os.PathLike[str],
    identity: dict[str, Any] | None,
    exporter_class: Callable[..., Exporter],
    options: dict[str, Any],
    max_shard_bytes: int,
    sync: bool,
    progress: Progress | None,
) -> Path:
    """Writes a checkpoint. If `identity` is None, the run cannot be resumed, and an error removes all files."""
    destination = Path(destination)
    if identity is not None and (destination / JOURNAL).exists():  # an earlier run was killed before this step
        (destination / JOURNAL).unlink(missing_ok=True)
        return destination
    exporter = exporter_class(**options)
    journal = open_journal(destination, identity, sync)
    try:
        for name, value in journal.exporter.items():
            setattr(exporter, name, deepcopy(value))
        _write_shards(source, exporter, journal, max_shard_bytes, sync, progress)
        _write_rest(source, exporter, journal)
        if not source.unchanged():
            raise _Changed(f"{source.name}: a file was changed while it was converted")
        if sync:
            sync_files([*journal.work.iterdir(), journal.work])
        journal.finish(destination, sync)
    except BaseException as error:
        # Keep complete shards for the next run, unless that run could not use them or would fail at the same layer.
        if identity is None or not journal.shards or isinstance(error, UnsupportedFormat | _Changed):
            journal.discard()
        journal.close()
        raise
    return destination


class _Changed(CheckpointError):
    """The source changed during the conversion, so the finished shards mix two versions of the source."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sets torch to one thread, so that the other cores are free for the writer.

    Memory bandwidth limits the speed of moving words, so more threads do not help. Threads that wait for the next move
    would spin and use CPU time. On two cores, a conversion with two torch threads took 1.4 times the CPU time of one
    with one thread, and more wall time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _stats(path: Path) -> dict[str, tuple[int, int, int]]:
    """Returns (bytes, time of the last change in ns, inode) for each file of a source, keyed by the file's name."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = {file.name: file.stat() for file in files if file.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def _write_json(file: Path, value: Any) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        temporary.write_text(json.dumps(value))  # json.dumps uses its fast C encoder only without indent
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{file}: cannot be written ({error.strerror})") from error


def _layers_and_others(reader: CheckpointReader, exporter: Exporter, start: int) -> Iterator[_Item]:
    """Yields (name, tensors) for the layers and then the other tensors, from index `start` on."""
    count = len(reader)
    for index in range(start, count):
        name = reader.layer_names[index]
        yield name, _named(name, _held(reader.read(index), exporter))
    for position, (name, read, dtype) in enumerate(reader.others(), start=count):
        if position >= start:
            yield name, [(name, read(), dtype)]


def _held(weight: PackedWeight | DenseWeight | None, exporter: Exporter) -> dict[str, Tensor | None]:
    """Returns a layer's tensors by name within the layer. Returns an empty dict for an omitted layer."""
    if isinstance(weight, PackedWeight):
        return {**exporter.tensors(weight), "bias": weight.bias}
    return {} if weight is None else {"weight": weight.weight, "bias": weight.bias}


def _named(layer: str, held: dict[str, Tensor | None]) -> list[NamedTensor]:
    return [(f"{layer}.{role}", tensor, None) for role, tensor in held.items() if tensor is not None]


def _write_shards(
    source: _Source,
    exporter: Exporter,
    journal: Journal,
    max_bytes: int,
    sync: bool,
    progress: Progress | None,
) -> None:
    for leftover in journal.work.glob(".*.tmp"):
        leftover.unlink()
    shard: ShardWriter | None = None
    done = journal.items
    total = source.total()

    def close() -> None:
        if shard is not None:
            shard.finish()
            if sync:
                sync_files([shard.path, journal.work])
            journal.add(shard.path.name, shard.names, done, exporter, sync)

    try:
        for name, tensors in source.items(exporter, done):
            size = sum(tensor.numel() * tensor.element_size() for _, tensor, _ in tensors)
            names = [tensor_name for tensor_name, _, _ in tensors]
            if shard is not None and shard.size and (shard.size + size > max_bytes or not shard.has_room(names)):
                close()
                shard = None
            shard = shard or ShardWriter(journal.work, f"model-{len(journal.shards) + 1:05d}.safetensors")
            for tensor_name, tensor, dtype in tensors:
                if tensor_name in journal.places or tensor_name in shard:
                    raise UnsupportedFormat(f"{source.name}: two tensors would have the name {tensor_name!r}")
                shard.add(tensor_name, tensor, dtype)
            done += 1
            if progress is not None:
                progress(name, done, total)
        close()
    except BaseException:
        if shard is not None:
            shard.discard()
        raise


def _write_rest(source: _Source, exporter: Exporter, journal: Journal) -> None:
    """Writes the index, the settings and the README, and copies the small files."""
    work = journal.work
    total = sum((work / shard).stat().st_size for shard in journal.shards)
    _write_json(work / INDEX, {"metadata": {"total_size": total}, "weight_map": journal.places})
    (work / README).unlink(missing_ok=True)  # write_card would keep a part that an interrupted run left
    for file in source.copied:
        try:
            shutil.copyfile(file, work / file.name)
        except OSError as error:
            raise CheckpointError(f"{work / file.name}: cannot be copied from {file} ({error.strerror})") from error
    if isinstance(exporter, NativeExporter) and exporter.has_layers:
        write_card(work)
    settings = {"quantization_config": exporter.settings()} if exporter.has_layers else {}
    _write_json(work / CONFIG, without_settings(source.config) | settings)


def _small_files(path: Path) -> list[Path]:
    """Returns the files that a model needs besides the weights. A GGUF file has none.

    Raises:
        CheckpointError: a file is a link to a target outside the checkpoint. Copying the link would publish the target.
    """
    if not path.is_dir():
        return []
    return [
        regular_file(file)
        for file in sorted(path.iterdir())
        if file.is_file() and file.suffix in COPIED and file.name not in NOT_COPIED
        if not file.name.endswith(".index.json") and not file.name.startswith(".")
    ]
