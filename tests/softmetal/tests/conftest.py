"""Loads the software Metal device for these tests; where it cannot be, they are skipped by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MISSING = ""
try:
    import softmetal  # noqa: F401
except RuntimeError as error:
    if type(error).__name__ != "Unavailable":
        raise
    MISSING = str(error)


class SkippedModule(pytest.Module):
    """A file whose imports would fail: one skip with the reason, which is counted."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Takes the place of every test file here where the device is missing."""
    if MISSING and module_path.parent == Path(__file__).parent:
        return SkippedModule.from_parent(parent, path=module_path)
    return None
