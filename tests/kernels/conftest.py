"""Puts the software device's package and the operators' reference on the path; without the device, skips by name."""

import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE.parent / "python")]

try:
    import softmetal  # noqa: F401
except Exception as error:
    if type(error).__name__ != "Unavailable":
        raise
    _reason = str(error)

    def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
        if file_path.parent == _HERE and file_path.name.startswith("test_"):
            pytest.skip(_reason, allow_module_level=True)
