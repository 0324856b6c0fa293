"""Sets up `device="mps"` before any test module asks torch about it. On Linux, loads the software Metal device.

The tests of the device itself have a conftest.py of their own, in `softmetal/tests/`.
"""

import gc
import os
import sys
from pathlib import Path

import pytest

# Turns garbage collection off until the tests are collected. The imported packages create a million objects that live
# as long as the process. Each pass of the collector scanned all of them, which took a tenth of the tests' time.
gc.disable()

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `tests.support` and `build_support`
from tests.support.mps import load_mps  # noqa: E402

pytest_plugins = ["tests.support.sampling"]

MPS_MISSING = load_mps()


class SkippedModule(pytest.Module):
    """Replaces a test file whose imports would fail, and reports one skip with the reason."""

    def collect(self):
        pytest.skip(MPS_MISSING or "needs the software Metal device, which Macs do not use", allow_module_level=True)


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "large: on the software Metal device in fast mode; all other tests that use mps run in its checked mode",
    )
    if MPS_MISSING and os.environ.get("TORCH_MARLIN_METAL_REQUIRE_MPS"):
        raise pytest.UsageError(f"the mps tests cannot run: {MPS_MISSING}")


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000, 5, 5)  # tests make many short-lived objects, and few cycles
    gc.enable()


def pytest_pycollect_makemodule(module_path, parent):
    """Skips the test files of `kernels/` on a Mac, and where the software Metal device is missing.

    Each skipped file is reported as skipped.
    """
    needs_device = "kernels" in set(module_path.relative_to(HERE).parts)
    if needs_device and (MPS_MISSING or sys.platform == "darwin"):
        return SkippedModule.from_parent(parent, path=module_path)
    return None


@pytest.fixture(scope="session")
def everything(request) -> bool:
    """Returns true if tests run all combinations of shapes and formats (make test-all), false if they run a sample."""
    return request.config.getoption("--everything")


@pytest.fixture(scope="session")
def run_folder(request, tmp_path_factory) -> Path:
    """Returns a folder for files that are made once per run. The workers of pytest-xdist share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "run"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def mps(request):
    """Returns "mps" after the device is set up.

    The software Metal device runs in checked mode, where a fault of any kernel fails the test. It also checks the rules
    of Metal's API validation.
    """
    if MPS_MISSING:
        pytest.skip(MPS_MISSING)
    if sys.platform == "darwin":
        yield "mps"
        return
    import softmetal

    if not softmetal.extension_path("torch_marlin_metal._C").exists():
        pytest.fail("torch_marlin_metal is not built for the software Metal device: run `make build`", pytrace=False)
    with softmetal.validated(), softmetal.checked(request.node.get_closest_marker("large") is None):
        yield "mps"


@pytest.fixture(params=["cpu", "mps"])
def device(request) -> str:
    """Runs a test once on each device. If there is no mps device, the run on `mps` is reported as skipped."""
    return request.getfixturevalue("mps") if request.param == "mps" else request.param
