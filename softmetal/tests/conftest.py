"""Makes the device before any test module asks torch about mps.

Without a device, every file is skipped and the reason shown.
"""

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


@pytest.fixture(params=[False, True], ids=["fast", "checked"])
def checked(request: pytest.FixtureRequest) -> bool:
    """Runs a test in fast mode and in checked mode."""
    return bool(request.param)
