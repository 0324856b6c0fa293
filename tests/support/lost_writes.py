"""Records a program's changes to the files of a folder, and creates the folders that a power failure may leave.

After a power failure, a disk contains at least the synced state: the bytes of each file at its last fsync, and the
entries of each folder at its last fsync. The disk may also contain any part of later changes. `Recording` sees only
changes through Python's own functions. A test must therefore check that a replay of all events gives the same folder as
the program.
"""

import builtins
import io
import os
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

Event = tuple[Any, ...]


@dataclass
class File:
    """A file: its changes in order, and the number of changes that are on the disk."""

    changes: list[Event] = field(default_factory=list)  # ("write", offset, bytes) or ("truncate", size)
    synced: int = 0


@dataclass
class Folder:
    """A folder: each state of its entries, and the oldest state that the disk may show."""

    states: list[dict[str, "File | Folder"]] = field(default_factory=lambda: [{}])
    synced: int = 0

    def change(self, name: str, node: "File | Folder | None") -> None:
        """Adds or replaces an entry. The node None removes the entry."""
        entries = {key: value for key, value in self.states[-1].items() if key != name}
        self.states.append(entries | ({} if node is None else {name: node}))


def replay(events: list[Event]) -> Folder:
    """Returns the folder after these events."""
    root = Folder()
    handles: dict[int, File] = {}

    def at(path: str) -> "File | Folder":
        node: File | Folder = root
        for part in Path(path).parts:
            assert isinstance(node, Folder)
            node = node.states[-1][part]
        return node

    def parent(path: str) -> Folder:
        found = at(str(Path(path).parent))
        assert isinstance(found, Folder)
        return found

    for kind, *rest in events:
        match kind:
            case "mkdir":
                parent(rest[0]).change(Path(rest[0]).name, Folder())
            case "open":
                handle, path = rest
                if Path(path).name not in parent(path).states[-1]:
                    parent(path).change(Path(path).name, File())
                handles[handle] = at(path)  # type: ignore[assignment]
            case "write" | "truncate":
                handles[rest[0]].changes.append((kind, *rest[1:]))
            case "rename":
                before, after = rest
                node = at(before)
                assert parent(before) is parent(after), "renames between folders are not modelled"
                entries = {k: v for k, v in parent(before).states[-1].items() if k != Path(before).name}
                parent(before).states.append(entries | {Path(after).name: node})
            case "remove":
                parent(rest[0]).change(Path(rest[0]).name, None)
            case "sync":
                node = at(rest[0])
                node.synced = len(node.changes) if isinstance(node, File) else len(node.states) - 1
    return root


def content(changes: list[Event]) -> bytes:
    held = bytearray()
    for kind, place, *data in changes:
        if kind == "truncate":
            held = held[:place].ljust(place, b"\0")
        else:
            held = held.ljust(place + len(data[0]), b"\0")
            held[place : place + len(data[0])] = data[0]
    return bytes(held)


def kept(node: "File | Folder", loss: str, rng: random.Random) -> "bytes | dict[str, Any]":
    """Returns the content of a file or folder on the disk after a power failure.

    Args:
        node: a file or folder.
        loss: what is lost:
            "nothing": nothing.
            "bytes": every unsynced byte of a file, and its unsynced length.
            "blocks": every unsynced byte of a file, but not its length.
            "weights": the same as "blocks", but only in safetensors files.
            "names": the unsynced entries of the outermost folder.
            "everything": all unsynced bytes and entries.
            "some": a random part of all unsynced bytes and entries.
        rng: chooses for "some".
    """
    if isinstance(node, Folder):
        oldest = {"some": rng.randrange(node.synced, len(node.states))}.get(loss, -1)
        if loss in ("names", "everything"):
            oldest = node.synced
        loss = "nothing" if loss == "names" else loss
        entries = node.states[oldest].items()
        return {
            name: kept(inner, "blocks" if loss == "weights" and ".safetensors" in name else loss, rng)
            for name, inner in entries
        }
    if loss in ("nothing", "weights"):
        return content(node.changes)
    on_disk = node.changes[: node.synced]
    if loss == "some":
        on_disk = on_disk + [change for change in node.changes[node.synced :] if rng.random() < 0.5]
    if loss == "blocks" or (loss == "some" and rng.random() < 0.5):
        return content([*on_disk, ("truncate", len(content(node.changes)))])
    return content(on_disk)


def lay_out(tree: dict[str, Any], path: Path) -> Path:
    path.mkdir()
    for name, inner in tree.items():
        if isinstance(inner, dict):
            lay_out(inner, path / name)
        else:
            (path / name).write_bytes(inner)
    return path


class Recording:
    """Records the changes in a folder during `with recording.watch():`. The folder is empty before that block."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Event] = []
        self._lock = threading.RLock()
        self._handles = 0

    def _name(self, path: Any, folder: int | None = None) -> str | None:
        """Returns a path relative to the folder, or None for a path outside of the folder."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif folder is not None:
            path = Path(os.readlink(f"/proc/self/fd/{folder}")) / path
        absolute = Path(os.path.abspath(path))
        return str(absolute.relative_to(self.root)) if absolute.is_relative_to(self.root) else None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Replaces Python's functions for files until the end of the block."""
        recording, real_open = self, builtins.open

        class Watched(io.FileIO):
            def __init__(self, path: Any, mode: str, name: str) -> None:
                existed = os.path.exists(path)
                super().__init__(path, mode)
                with recording._lock:
                    recording._handles += 1
                    self.handle = recording._handles
                    recording.events.append(("open", self.handle, name))
                    if existed and "w" in mode:
                        recording.events.append(("truncate", self.handle, 0))

            def write(self, data: Any) -> int:
                with recording._lock:
                    place = self.tell()
                    count = super().write(data)
                    recording.events.append(("write", self.handle, place, bytes(data)[:count]))
                return count

            def truncate(self, size: int | None = None) -> int:
                with recording._lock:
                    done = super().truncate(size)
                    recording.events.append(("truncate", self.handle, done))
                return done

        def opened(
            path: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *rest: Any, **more: Any
        ) -> Any:
            name = None if isinstance(path, int) else recording._name(path)
            if name is None or not set(mode) & set("wx+a"):
                return real_open(path, mode, buffering, encoding, *rest, **more)
            assert "a" not in mode, "appending is not modelled"
            raw = Watched(path, mode.replace("b", "").replace("t", ""), name)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding)

        def noted(name: str, event: str) -> Any:
            real = getattr(os, name)

            def call(path: Any, *rest: Any, dir_fd: int | None = None, **more: Any) -> Any:
                names = [recording._name(path, dir_fd)]
                if event == "rename":
                    names.append(recording._name(rest[0]))
                with recording._lock:
                    done = real(path, *rest, **more, **({} if dir_fd is None else {"dir_fd": dir_fd}))
                    if names[0] is not None:
                        recording.events.append((event, *names))
                return done

            return mock.patch.object(os, name, call)

        with ExitStack() as stack:
            for module in (builtins, io):
                stack.enter_context(mock.patch.object(module, "open", opened))
            # shutil then copies with write, which is recorded
            for name in ("_USE_CP_SENDFILE", "_USE_CP_COPY_FILE_RANGE"):
                if hasattr(shutil, name):
                    stack.enter_context(mock.patch.object(shutil, name, False))
            for name, event in (
                *(("mkdir", "mkdir"), ("rename", "rename"), ("replace", "rename"), ("fsync", "sync")),
                *(("unlink", "remove"), ("remove", "remove"), ("rmdir", "remove")),
            ):
                stack.enter_context(noted(name, event))
            yield
