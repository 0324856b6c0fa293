"""Fixtures for several folders: a tiny model of tests/data/models with a device, and what a test has made so far."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parent / "data" / "models"
# All models run on the CPU. On mps only these run, or all models with --everything.
ON_MPS = ("awq-gemm-asym-g32", "compressed-tensors-int4-asym-g32", "gptq-sym-g32-actorder")


def pytest_generate_tests(metafunc) -> None:
    if "folder_and_device" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--everything")
        folders = sorted(path.parent for path in MODELS.glob("*/model.safetensors"))
        pairs = [(folder, "cpu") for folder in folders]
        pairs += [(folder, "mps") for folder in folders if everything or folder.name in ON_MPS]
        ids = [f"{folder.name}-{device}" for folder, device in pairs]
        metafunc.parametrize("folder_and_device", pairs, ids=ids, indirect=True)


@pytest.fixture
def folder_and_device(request) -> tuple[Path, str]:
    """Returns a folder of tests/data/models and a device that is ready."""
    folder, device = request.param
    return folder, request.getfixturevalue("mps") if device == "mps" else device


@pytest.fixture
def new_objects() -> Callable[[], list[Any]]:
    """Returns a function that returns the objects made since the test began, of those that Python's collector knows.

    The objects of imported packages, more than a million, are left out: to look at each takes 0.2 s. Python never
    collects the objects that exist when the test begins, until this worker ends.
    """
    gc.collect()
    gc.freeze()
    return gc.get_objects
