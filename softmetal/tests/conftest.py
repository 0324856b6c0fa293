"""Makes the device before any test module asks torch about mps.

Without a device, every file is skipped and the reason shown.
"""

from collections.abc import Iterator

import pytest

import softmetal

try:
    softmetal.install()
    MISSING = ""
except softmetal.Unavailable as error:
    MISSING = str(error)


class SkippedModule(pytest.Module):
    """Replaces a test file whose imports would fail, and reports one skip with the reason."""

    def collect(self):
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return SkippedModule.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture
def mps() -> Iterator[str]:
    """Runs a test in checked mode and with the rules of API validation. A fault in any kernel fails the test."""
    with softmetal.validated(), softmetal.checked():
        yield "mps"
