"""Fixtures for several folders: a tiny model of tests/data/models with a device, and the objects of a test."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parent / "data" / "models"
# All models run on the CPU. Only these run on mps, unless --everything is given.
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
    """Returns a folder of tests/data/models, and a device that can be used."""
    folder, device = request.param
    return folder, request.getfixturevalue("mps") if device == "mps" else device


@pytest.fixture
def new_objects() -> Callable[[], list[Any]]:
    """Returns a function that lists the objects created since the test began, as far as Python's collector tracks them.

    Older objects are left out: imported packages have more than a million, and a look at all of these takes 0.2 s. The
    side effect is that Python does not collect the older objects until this worker ends.
    """
    gc.collect()
    gc.freeze()
    return gc.get_objects
