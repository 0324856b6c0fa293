"""Signposts and GPU captures for kernels on a Mac, with PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.mps import profiler


@contextmanager
def trace(*, capture: str | Path | None = None, wait_until_completed: bool = False) -> Iterator[None]:
    """Marks each kernel in the `with` block with a signpost. Optionally captures the GPU's work.

    The signposts have the kernels' names, such as "gemv_uint4b8_float16". Apple's Instruments shows them in its Logging
    instrument under "PyTorchMPS". Xcode opens the capture.

    Args:
        capture: the file to write, ending in .gputrace. The process must have started with MTL_CAPTURE_ENABLED=1.
        wait_until_completed: True to run one kernel at a time, so that the intervals do not overlap.

    Raises:
        RuntimeError: this machine has no Mac GPU, or captures are not enabled.
        ValueError: the name of the file does not end in .gputrace.
        FileExistsError: the file exists.
    """
    if not torch.backends.mps.is_available() or not torch.backends.mps.is_built():
        raise RuntimeError("profiling.trace: needs a Mac whose GPU torch can use through MPS")
    with ExitStack() as stack:
        if capture is not None:
            stack.enter_context(profiler.metal_capture(str(_checked(Path(capture)))))
        stack.enter_context(profiler.profile("interval", wait_until_completed))
        yield


def _checked(path: Path) -> Path:
    if path.suffix != ".gputrace":
        raise ValueError(f"profiling.trace: capture: expected a name that ends in .gputrace, got {str(path)!r}")
    if path.exists():
        raise FileExistsError(f"profiling.trace: capture: {path} exists")
    if not profiler.is_metal_capture_enabled():
        raise RuntimeError("profiling.trace: capture: start Python with MTL_CAPTURE_ENABLED=1 in its environment")
    return path
