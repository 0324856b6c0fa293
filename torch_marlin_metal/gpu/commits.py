"""When the GPU is given the work that the operators encode."""

from __future__ import annotations

from torch_marlin_metal.extension import native


def commit_interval() -> float:
    """Returns the predicted GPU time between two commits in seconds; 0 means that the operators never commit."""
    seconds: float = native.commit_seconds()
    return seconds


def set_commit_interval(seconds: float) -> None:
    """Sets how much predicted GPU time the operators encode on mps before they commit it.

    PyTorch gives the GPU what is encoded when somebody waits for a result. Without commits in between, the GPU idles
    while the host encodes a whole token. With too many of them it loses about 20 microseconds at each.
    `TORCH_MARLIN_METAL_COMMIT_MS`, in milliseconds, sets the first value; the default is 3 ms. While
    `torch.mps.profiler` records, the operators do not commit.

    Args:
        seconds: of predicted GPU time; 0 for never.

    Raises:
        ValueError: `seconds` is negative or not finite.
    """
    native.set_commit_seconds(seconds)
