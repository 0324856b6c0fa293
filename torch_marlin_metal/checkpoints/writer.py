"""Converts a whole checkpoint, one layer at a time; a run that was killed can go on.

Everything is written into `<destination>.partial`, which takes the destination's name when it is complete. A journal
there lists the shards that are: a later run with the same source and options goes on after the last of them, and the
result has the same bytes as that of a run in one piece.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from torch_marlin_metal.convert.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.convert.export import EXPORTERS, Exporter
from torch_marlin_metal.convert.native import NativeExporter
from torch_marlin_metal.convert.reader import CheckpointReader, DenseWeight
from torch_marlin_metal.convert.shard_writer import ShardWriter
from torch_marlin_metal.packed_weight import PackedWeight

JOURNAL = ".torch_marlin_metal.json"
DEFAULT_SHARD_BYTES = 1 << 29
INDEX = "model.safetensors.index.json"
# Files beside the weights that a model needs; weights, settings and code of any kind stay behind.
COPIED = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken")
NOT_COPIED = (
    "config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
)

TARGETS: dict[str, Callable[..., Exporter]] = {"native": NativeExporter, **EXPORTERS}

Progress = Callable[[str, int, int], None]
NamedTensor = tuple[str, Tensor, str | None]


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
    """Writes every layer and every other tensor of an opened checkpoint in the package's own format or another's.

    Args:
        reader: from `open_reader`; its `on_unsupported` decides about layers that cannot be packed (dequantized ones
            are stored as fp32 `weight`).
        destination: the directory to make; it must not exist.
        target: "native", or one of `EXPORTERS`.
        max_shard_bytes: a shard is closed when the next layer would make it larger.
        sync: wait until every file is on the disk before the destination gets its name; otherwise, as with `cp`, a
            power failure shortly afterwards may damage it.
        progress: called with (name, position, count) after each layer and each other tensor.
        **options: the exporter's: `version` (1 or 2) for "gptq".

    Returns:
        The destination.

    Raises:
        ValueError: an unknown target.
        FileExistsError: the destination exists, or `<destination>.partial` does and is not a conversion's.
        UnsupportedFormat: the target cannot hold a layer without loss.
        CheckpointError: the source is damaged, or a file cannot be written; what is complete is kept for a later run.
    """
    destination = Path(destination)
    work = destination.with_name(destination.name + ".partial")
    if (destination / JOURNAL).exists():  # killed between the last two steps
        (destination / JOURNAL).unlink()
        return destination
    if destination.exists():
        raise FileExistsError(f"{destination}: exists already")
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    identity = _identity(reader, max_shard_bytes) | {"target": target, "target_options": options}
    journal = _open_journal(work, identity)
    exporter = TARGETS[target](**(options | journal["exporter"]))
    with nullcontext() if reader.calculates else _one_thread():
        _write_shards(reader, exporter, work, journal, max_shard_bytes, progress)
    _write_rest(reader, exporter, work, journal)
    if sync:
        for path in (*work.iterdir(), work):
            _sync(path)
    work.replace(destination)
    (destination / JOURNAL).unlink()
    return destination


@contextmanager
def _one_thread() -> Iterator[None]:
    """Leaves the other cores to the thread that writes.

    Moves of words wait for memory more than for a core, and between them torch's other threads would spin: with them a
    conversion took 1.4 times the CPU time and, on two cores, longer.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        os.close(descriptor)


def _identity(reader: CheckpointReader, max_shard_bytes: int) -> dict[str, Any]:
    """Says what a conversion converts and how; another identity starts anew."""
    files = sorted(reader.path.iterdir()) if reader.path.is_dir() else [reader.path]
    stats = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()}
    return {"files": stats, "options": reader.settings(), "max_shard_bytes": max_shard_bytes}


def _open_journal(work: Path, identity: dict[str, Any]) -> dict[str, Any]:
    fresh: dict[str, Any] = {"identity": identity, "items": 0, "shards": [], "exporter": {}}
    if work.exists():
        if not (work / JOURNAL).exists():
            raise FileExistsError(f"{work}: exists, and is not an unfinished conversion")
        try:
            journal = json.loads((work / JOURNAL).read_text())
        except ValueError:
            journal = {}
        if journal.get("identity") == json.loads(json.dumps(identity)) and _complete(work, journal):
            return dict(journal)
        shutil.rmtree(work)
    staging = work.with_name(work.name + ".new")  # a partial directory without a journal must never be seen
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        _write_json(staging / JOURNAL, fresh)
        staging.replace(work)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return fresh


def _complete(work: Path, journal: dict[str, Any]) -> bool:
    """Whether the shards are as long as they were: after a power failure files may be shorter than what was written."""
    files = [(work / shard["file"], shard["bytes"]) for shard in journal["shards"]]
    return all(file.exists() and file.stat().st_size == size for file, size in files)


def _write_json(file: Path, value: Any) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        temporary.write_text(json.dumps(value))  # with indent, json would not use its C encoder
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{file}: cannot be written ({error.strerror})") from error


def _copy(file: Path, destination: Path) -> None:
    try:
        shutil.copyfile(file, destination)
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be copied from {file} ({error.strerror})") from error


def _items(reader: CheckpointReader, exporter: Exporter, start: int) -> Iterator[tuple[str, list[NamedTensor]]]:
    """Yields the layers and then the other tensors from position `start`, each with its name and tensors."""
    count = len(reader)
    for index in range(start, count):
        converted = reader.read(index)
        held: dict[str, Tensor | None] = {}
        if isinstance(converted, PackedWeight):
            held = {**exporter.tensors(converted), "bias": converted.bias}
        elif isinstance(converted, DenseWeight):
            held = {"weight": converted.weight, "bias": converted.bias}
        name = reader.layer_names[index]
        yield name, [(f"{name}.{role}", tensor, None) for role, tensor in held.items() if tensor is not None]
    for position, (name, read, dtype) in enumerate(reader.source.others(), start=count):
        if position >= start:
            yield name, [(name, read(), dtype)]


def _write_shards(
    reader: CheckpointReader,
    exporter: Exporter,
    work: Path,
    journal: dict[str, Any],
    max_bytes: int,
    progress: Progress | None,
) -> None:
    for leftover in work.glob(".*.tmp"):
        leftover.unlink()
    shard: ShardWriter | None = None
    done = int(journal["items"])
    total = len(reader) + sum(1 for _ in reader.source.others())

    def close() -> None:
        if shard is not None:
            shard.finish()
            entry = {"file": shard.path.name, "bytes": shard.path.stat().st_size, "tensors": shard.names}
            journal["shards"].append(entry)
            # The exporter may have seen one layer more than is written; it will see that one again.
            journal["exporter"], journal["items"] = asdict(cast(Any, exporter)), done
            _write_json(work / JOURNAL, journal)

    try:
        for name, tensors in _items(reader, exporter, done):
            size = sum(tensor.numel() * tensor.element_size() for _, tensor, _ in tensors)
            names = [tensor_name for tensor_name, _, _ in tensors]
            if shard is not None and shard.size and (shard.size + size > max_bytes or not shard.has_room(names)):
                close()
                shard = None
            shard = shard or ShardWriter(work, f"model-{len(journal['shards']) + 1:05d}.safetensors")
            for tensor_name, tensor, dtype in tensors:
                shard.add(tensor_name, tensor, dtype)
            done += 1
            if progress is not None:
                progress(name, done, total)
        close()
    except BaseException as error:
        if shard is not None:
            shard.discard()
        # Complete shards are kept for the next run, unless it would fail at the same layer.
        if not journal["shards"] or isinstance(error, UnsupportedFormat):
            shutil.rmtree(work, ignore_errors=True)
        raise


def _write_rest(reader: CheckpointReader, exporter: Exporter, work: Path, journal: dict[str, Any]) -> None:
    """Writes what makes the directory a checkpoint: the index, the settings, and copies of the small files."""
    places = {name: shard["file"] for shard in journal["shards"] for name in shard["tensors"]}
    total = sum((work / shard["file"]).stat().st_size for shard in journal["shards"])
    _write_json(work / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    config: dict[str, Any] = {}
    if reader.path.is_dir():
        for file in sorted(reader.path.iterdir()):
            skipped = file.name in NOT_COPIED or file.name.endswith(".index.json") or file.name.startswith(".")
            if file.is_file() and file.suffix in COPIED and not skipped:
                _copy(file, work / file.name)
        config = dict(reader.source.config)
    for key in ("quantization", "compression_config"):
        config.pop(key, None)
    _write_json(work / "config.json", config | {"quantization_config": exporter.settings()})
