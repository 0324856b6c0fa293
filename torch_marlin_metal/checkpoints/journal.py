"""The journal of a conversion: lists the complete files of the output directory and locks the directory.

The first line of the journal contains the source and the options. Each finished shard appends one line, and no line is
rewritten, so the time to write the journal is linear in the number of tensors. The process locks the journal's file.
When the process ends, the system releases this lock.
"""

import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.files.safetensors import read_header

JOURNAL = ".torch_marlin_metal.json"
SHARD = re.compile(r"model-\d{5,}\.safetensors")


@dataclass
class Journal:
    """An open journal, locked by this process.

    Attributes:
        work: the directory under construction.
        stream: the open file of the journal, which carries the lock.
        items: the number of layers and other tensors in the finished shards.
        shards: names of the finished shards.
        places: name of a tensor -> the finished shard that contains it.
        exporter: the exporter's fields, as they were after the last finished shard.
    """

    work: Path
    stream: BinaryIO
    items: int = 0
    shards: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    exporter: dict[str, Any] = field(default_factory=dict)

    def add(self, shard: str, tensors: list[str], items: int, exporter: Any, sync: bool) -> None:
        """Adds a finished shard and the new entries of the exporter's fields.

        If `sync` is True, waits until the shard and the journal are on the disk.

        Raises:
            CheckpointError: the journal cannot be written.
        """
        # The fields may already describe a layer of the next shard. A resumed run converts this layer again.
        line = {"file": shard, "tensors": tensors, "items": items, "exporter": self._growth(exporter)}
        try:
            _append(self.stream, line)
            if sync:
                os.fsync(self.stream.fileno())
        except OSError as error:
            raise _unwritable(self.work / JOURNAL, error) from error
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        self.shards.append(line["file"])
        self.places.update(dict.fromkeys(line["tensors"], line["file"]))
        self.items = line["items"]
        for name, value in line["exporter"].items():
            if isinstance(value, dict):
                self.exporter.setdefault(name, {}).update({key: _tuples(one) for key, one in value.items()})
            else:
                self.exporter[name] = _tuples(value)

    def _growth(self, exporter: Any) -> dict[str, Any]:
        """Returns the exporter's fields. Dicts contain only new entries, because exporters never remove entries."""
        found: dict[str, Any] = {}
        for name in (each.name for each in fields(exporter)):
            value = getattr(exporter, name)
            if isinstance(value, dict):
                count = len(value) - len(self.exporter.get(name, ()))
                newest = [item for _, item in zip(range(count), reversed(value.items()), strict=False)]
                found[name] = dict(reversed(newest))
            else:
                found[name] = value
        return found

    def finish(self, destination: Path, sync: bool) -> None:
        """Renames the directory to the destination and releases the lock.

        If `sync` is True, waits before the release until the new name is on the disk.
        """
        try:
            self.work.rename(destination)
            if sync:  # before `unlink`: if a power failure undoes the rename, `open_journal` needs the journal
                sync_files([destination.parent])
            (destination / JOURNAL).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(destination, error) from error
        self.close()

    def discard(self) -> None:
        """Removes the directory and releases the lock."""
        _remove(self.work)
        self.close()

    def close(self) -> None:
        """Releases the lock but does not remove the directory."""
        self.stream.close()


def _tuples(value: Any) -> Any:
    """Converts lists to tuples. JSON turned the exporters' tuples into lists, and exporters have no lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def open_journal(destination: Path, identity: dict[str, Any] | None, sync: bool) -> Journal:
    """Makes the directory `<destination>.partial`, or resumes an earlier run with the same identity.

    Args:
        destination: the directory that the conversion produces.
        identity: the source and the options as JSON types. None means that no earlier run is resumed.
        sync: True to wait until a new directory is on the disk.

    Raises:
        FileExistsError: the destination exists, another process converts into it, or `<destination>.partial` is not an
            unfinished conversion.
        CheckpointError: the directory cannot be created.
    """
    work = destination.with_name(destination.name + ".partial")
    identity = json.loads(json.dumps(identity))
    while True:  # another process may create, finish or remove the directory between two steps: then retry
        if os.path.lexists(destination):
            raise FileExistsError(f"{destination}: exists already")
        try:
            made = _take_over(work, identity) if os.path.lexists(work) else _create(work, identity, sync)
        except FileExistsError:
            raise
        except OSError as error:
            raise _unwritable(work, error) from error
        if made is not None:
            return made


def _create(work: Path, identity: Any, sync: bool) -> Journal | None:
    staging = _other_name(work)  # renamed to `work` only after it contains a locked journal
    staging.mkdir(parents=True)
    stream = (staging / JOURNAL).open("xb", buffering=0)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _append(stream, {"identity": identity})
        if sync:
            sync_files([staging / JOURNAL, staging])
        if os.path.lexists(work):
            raise FileExistsError
        staging.rename(work)
        if sync:
            sync_files([work.parent])
    except BaseException as error:
        stream.close()
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and os.path.lexists(work):
            return None
        raise
    return Journal(work, stream)


def _take_over(work: Path, identity: Any) -> Journal | None:
    try:
        stream = (work / JOURNAL).open("r+b", buffering=0)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not os.path.lexists(work):
            return None
        raise FileExistsError(f"{work}: exists, and is not an unfinished conversion") from error
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(stream.fileno()), (work / JOURNAL).stat()):
            raise FileNotFoundError
    except BlockingIOError as error:
        stream.close()
        raise FileExistsError(f"{work}: another conversion is writing it") from error
    except FileNotFoundError:  # another conversion has finished and removed its journal
        stream.close()
        return None
    found = Journal(work, stream)
    if identity is None or not _read(found, identity):
        found.discard()
        return None
    return found


def _read(journal: Journal, identity: Any) -> bool:
    """Reads the journal. Returns True if it belongs to the same conversion and all its shards are complete."""
    content = journal.stream.read()
    *lines, torn = content.split(b"\n")  # a killed process or a full disk can truncate the last line
    try:
        if json.loads(lines[0]) != {"identity": identity}:
            return False
        for line in map(json.loads, lines[1:]):
            if not SHARD.fullmatch(line["file"]) or type(line["items"]) is not int:
                return False
            # The header is written last. After a power failure, a file of full length may lack its header.
            if list(read_header(journal.work / line["file"])[0]) != line["tensors"]:
                return False
            journal._take(line)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # includes CheckpointError
        return False
    journal.stream.seek(len(content) - len(torn))
    journal.stream.truncate()
    return True


def _append(stream: BinaryIO, value: Any) -> None:
    data = memoryview(json.dumps(value, separators=(",", ":")).encode() + b"\n")
    while data:
        data = data[stream.write(data) :]


def _remove(work: Path) -> None:
    """Renames a directory before its removal, so that no other process sees a partly removed directory."""
    trash = _other_name(work)
    try:
        work.rename(trash)
    except OSError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def _other_name(work: Path) -> Path:
    return work.with_name(f".{work.name}.{uuid.uuid4().hex}")


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be written ({error.strerror})")


def sync_files(paths: Iterable[Path]) -> None:
    """Waits until files and directories are on the disk.

    Raises:
        CheckpointError: the disk reported an error.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise _unwritable(path, error) from error
        finally:
            os.close(descriptor)
