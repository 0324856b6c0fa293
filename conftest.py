"""Makes `device="mps"` ready before any test module asks torch about it. On Linux it loads the software Metal device.

The tests of the device itself have a conftest.py of their own, in `softmetal/tests/`.
"""

import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `tests.support` and `build_support`
from tests.support.mps import load_mps  # noqa: E402
from tests.support.samples import covering  # noqa: E402

MPS_MISSING = load_mps()


class SkippedModule(pytest.Module):
    """Stands for a test file whose imports would fail, and reports one skip with the reason."""

    def collect(self):
        pytest.skip(MPS_MISSING or "needs the software Metal device, which Macs do not use", allow_module_level=True)


def pytest_addoption(parser):
    parser.addoption("--everything", action="store_true", help="whole matrices of shapes instead of samples")


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "whole: beyond the sample that each run takes; only --everything (make test-all) runs it",
    )
    config.addinivalue_line(
        "markers",
        "each_value_on_mps: on mps so few cases that each value of each argument occurs; --everything runs all cases",
    )
    config.addinivalue_line("markers", "beyond_sample: on mps only with --everything")
    config.addinivalue_line(
        "markers",
        "large: on the software Metal device in fast mode; all other tests that use mps run in its checked mode",
    )
    if MPS_MISSING and os.environ.get("TORCH_MARLIN_METAL_REQUIRE_MPS"):
        raise pytest.UsageError(f"the mps tests cannot run: {MPS_MISSING}")


def pytest_collection_modifyitems(config, items):
    """Deselects the cases beyond the samples, unless --everything asks for them."""
    if config.getoption("--everything"):
        return
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("each_value_on_mps") and item.callspec.params.get("device", "mps") == "mps":
            functions[item.getparent(pytest.Module).nodeid, item.originalname].append(item)
    beyond = {item for item in items if item.get_closest_marker("whole")}
    on_mps = (item for item in items if hasattr(item, "callspec") and item.callspec.params.get("device") == "mps")
    beyond |= {item for item in on_mps if item.get_closest_marker("beyond_sample")}
    for cases in functions.values():
        sample = covering([{(name, repr(value)) for name, value in item.callspec.params.items()} for item in cases])
        beyond |= {item for i, item in enumerate(cases) if i not in sample}
    config.hook.pytest_deselected(items=list(beyond))
    items[:] = [item for item in items if item not in beyond]


def pytest_pycollect_makemodule(module_path, parent):
    """Skips each file of `kernels/`, which needs the software Metal device, if the device is missing or not used.

    The report names each skipped file.
    """
    needs_device = "kernels" in set(module_path.relative_to(HERE).parts)
    if needs_device and (MPS_MISSING or sys.platform == "darwin"):
        return SkippedModule.from_parent(parent, path=module_path)
    return None


@pytest.fixture(scope="session")
def everything(request) -> bool:
    """Returns whether tests run all combinations of shapes and formats (make test-all) or a sample."""
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
    """Prepares the device.

    The software Metal device runs in checked mode, in which a fault of any kernel fails the test, and with the rules of
    Metal's API validation.
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
    """Runs a test once on each device. The run on `mps` is reported as skipped if there is no mps device."""
    return request.getfixturevalue("mps") if request.param == "mps" else request.param
