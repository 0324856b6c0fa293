"""Instantiates, launches and compares MLX's own Metal kernels, unmodified, from the pinned wheel `mlx-metal`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from msl_kernels import HEADER, Library

from softmetal import device
from softmetal.apple import wheels
from softmetal.proof.case import numbered

KERNELS = "mlx/backend/metal/kernels"


@functools.cache
def _include() -> str:
    try:
        return str(wheels.unpack("mlx-metal") / "mlx" / "include")
    except wheels.WheelUnavailable as error:
        pytest.skip(f"MLX's Metal sources are not at hand: {error}")


@functools.cache
def _compiled(headers: tuple[str, ...], instances: tuple[str, ...]) -> Library:
    lines = [f'#include "{KERNELS}/{h}"' for h in ("utils.h", *headers)]
    lines += [f'template [[host_name("{i}")]] [[kernel]] decltype({i}) {i};' for i in instances]
    return device.compile(HEADER + "\n".join(lines), include_paths=[_include()])


def mlx(headers: Sequence[str], instances: Sequence[str]) -> Library:
    """Compiles MLX headers. Each instance, for example "arange<float>", becomes a kernel of that name."""
    return _compiled(tuple(headers), tuple(instances))


def launch(library: Library, kernel: str, *buffers: object, **launch: object) -> None:
    """Launches a kernel. Numbers are passed as constants: an int as int32, a float as float32."""
    library.kernel(kernel).launch(buffers=[numbered(b) for b in buffers], **launch)


def assert_within(got: np.ndarray, wanted: np.ndarray, bound: np.ndarray | float) -> None:
    """Asserts that the error of each element is within the element's bound."""
    error = np.abs(got.astype(np.float64) - wanted)
    worst = np.max(error - bound)
    assert np.isfinite(got.astype(np.float64)).all()
    assert worst <= 0, f"off by {error.max():.3g}, {worst:.3g} over the bound"
