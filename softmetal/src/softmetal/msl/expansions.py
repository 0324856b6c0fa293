"""Caches the output of clang -E for a source. If an included file changes, the cached output is no longer used."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from .tools import store


def _stamps(files: Sequence[str]) -> list[list[int]]:
    return [[(stat := os.stat(file)).st_mtime_ns, stat.st_size] for file in files]


def load(path: Path) -> str | None:
    """Returns the text of a cache file. Returns None if there is no file, or if an included file has changed."""
    try:
        files, stamps, text = json.loads(zlib.decompress(path.read_bytes()))
        return str(text) if _stamps(files) == stamps else None
    except OSError:
        return None


def save(path: Path, text: str, files: Sequence[str]) -> None:
    """Writes a cache file. `files` are the files that the source includes."""
    store(path, zlib.compress(json.dumps([files, _stamps(files), text]).encode(), 1))
