"""Names the processes that have ended or hang, when communication between processes fails."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

# Seconds that a process waits for reports of other processes: after the timeout of the group or, if only one report is
# missing, after the last report.
GRACE = 2.0


@contextmanager
def naming_failed_ranks(operation: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """If communication inside the block fails, raises an error that names the processes that have ended or hang.

    gloo's own error contains at most an address. After a failure, each process therefore writes a report into the store
    of the process group. The error then names the processes without a report, because these have ended or hang. Rank 0
    owns the store, so if rank 0 has ended, the error names rank 0.

    A process detects that another process hangs only after the timeout of `init_process_group`, by default 30 minutes.

    Args:
        operation: a description of the operation for the error message.
        group: the processes. None means all processes.

    Raises:
        RuntimeError: communication inside the block raised a RuntimeError. The new error contains its message.
    """
    if torch.compiler.is_compiling():
        yield
        return
    try:
        yield
    except RuntimeError as error:
        culprits = _culprits(group or dist.distributed_c10d._get_default_group())
        raise RuntimeError(f"{operation}: {culprits}: {error}") from error


def _culprits(group: dist.ProcessGroup) -> str:
    """Reports the failure of this process. Returns a sentence about the processes that do not report."""
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
    prefix = f"torch_marlin_metal/failed/{group.group_name}"
    now = time.monotonic()
    end, since = now + _timeout(group) + GRACE, now
    missing = set(ranks) - {own}
    try:
        store = _get_default_store()
        store.set(f"{prefix}/{own}", "1")
        while missing and now < end and not (len(missing) == 1 and now > since + GRACE):
            left = {rank for rank in missing if not store.check([f"{prefix}/{rank}"])}
            if left != missing:
                missing, since = left, now
            time.sleep(0.05)
            now = time.monotonic()
        if own == 0:
            time.sleep(GRACE / 4)  # the store ends with this process, and others may still read it
    except RuntimeError:
        missing = {0}
    if not missing:
        return "communication failed in every process"
    listed = " and ".join(f"rank {rank}" for rank in sorted(missing))
    return f"{listed} of {dist.get_world_size()} ended, or did not answer in {_timeout(group):g} seconds"


def _timeout(group: dist.ProcessGroup) -> float:
    options = group._get_backend(torch.device("cpu")).options
    return float(options._timeout.total_seconds())
