"""The devices that tests run on: `cpu`, and `mps`, which is the software Metal device where there is no Mac."""

import os
import sys
from pathlib import Path

import pytest
import torch


def load_mps() -> str | None:
    """Makes `device="mps"` ready; returns why there is none. To be called before anything asks torch about MPS."""
    if sys.platform == "darwin":
        return None if torch.backends.mps.is_available() else "this Mac has no MPS device"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    try:
        import softmetal  # noqa: F401
    except RuntimeError as error:
        if type(error).__name__ != "Unavailable":  # a class of the package that was not imported
            raise
        return str(error)
    return None


MPS_MISSING = load_mps()


def pytest_configure(config: pytest.Config) -> None:
    if MPS_MISSING and os.environ.get("TORCH_MARLIN_METAL_REQUIRE_MPS"):
        raise pytest.UsageError(f"the mps tests cannot run: {MPS_MISSING}")


@pytest.fixture(params=["cpu", "mps"])
def device(request: pytest.FixtureRequest) -> str:
    """Tests that take it run on each device; those of `mps` are skipped by name where there is none."""
    if request.param == "mps" and MPS_MISSING:
        pytest.skip(MPS_MISSING)
    return request.param
