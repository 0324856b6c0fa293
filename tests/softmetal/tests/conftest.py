"""Puts `tests/` on the path and loads the software Metal device, or skips these tests by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import softmetal  # noqa: F401
except Exception as error:
    if type(error).__name__ != "Unavailable":
        raise
    _reason = str(error)
    collect_ignore_glob: list[str] = []

    def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
        if file_path.parent == Path(__file__).parent and file_path.name.startswith("test_"):
            pytest.skip(_reason, allow_module_level=True)
