"""Sets when the operators commit encoded work to the GPU."""

from __future__ import annotations

from torch_marlin_metal.extension import native


def commit_interval() -> float:
    """Returns the predicted GPU time between two commits, in seconds. 0 means that the operators never commit.

    Examples:
        >>> tmm.tuning.commit_interval() > 0
        True
    """
    seconds: float = native.commit_seconds()
    return seconds


def set_commit_interval(seconds: float) -> None:
    """Sets the amount of predicted GPU time that the operators encode on mps before they commit.

    PyTorch commits encoded work to the GPU only when the program waits for a result. Without earlier commits, the GPU
    would idle while the host encodes the kernels of a complete token. However, each commit costs the GPU about 20
    microseconds. `TORCH_MARLIN_METAL_COMMIT_MS`, in milliseconds, sets the initial value. The default is 3 ms. While
    `torch.mps.profiler` records, the operators do not commit.

    Args:
        seconds: predicted GPU time between two commits. 0 means that the operators never commit.

    Raises:
        ValueError: `seconds` is negative or not finite.

    Examples:
        >>> before = tmm.tuning.commit_interval()
        >>> tmm.tuning.set_commit_interval(2e-3)
        >>> tmm.tuning.commit_interval()
        0.002
        >>> tmm.tuning.set_commit_interval(before)
    """
    native.set_commit_seconds(seconds)
