"""Makes the device before any test module asks torch about mps. Without a device, every file is skipped with a reason."""

from collections.abc import Iterator

import pytest

import softmetal

try:
    softmetal.install()
    MISSING = ""
except softmetal.Unavailable as error:
    MISSING = str(error)


class SkippedModule(pytest.Module):
    """Stands for a test file whose imports would fail, and reports one skip with the reason."""

    def collect(self):
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return SkippedModule.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture
def mps() -> Iterator[str]:
    """Runs a test in checked mode, in which a fault of any kernel fails it, and with the rules of API validation."""
    with softmetal.validated(), softmetal.checked():
        yield "mps"
