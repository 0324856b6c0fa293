import pytest
import torch


def available_devices() -> list[str]:
    return ["cpu", "mps"] if torch.backends.mps.is_available() else ["cpu"]


@pytest.fixture(params=available_devices())
def device(request) -> str:
    """Each device that this machine has; tests that take it run once on each."""
    return request.param
