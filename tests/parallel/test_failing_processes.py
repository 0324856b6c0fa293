"""If a process ends or hangs, all other processes end within the timeout, with an error that names that process."""

import contextlib
import os
import signal
import time

import pytest
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.support.linear_layers import activations, layer_of
from tests.support.processes import error_of, run
from torch_marlin_metal.parallel import MarlinRowwiseParallel

TIMEOUT = 5
K = 384


def multiply(rank: int, world: int, folder, kind: str) -> None:
    """Runs in each process. The process of rank 1 ends or hangs before the second product."""
    mesh = init_device_mesh("cpu", (world,))
    layer = parallelize_module(layer_of("uint4b8", K=K, N=16), mesh, MarlinRowwiseParallel())
    x = activations(2, K // world)
    layer(x)
    if rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL if kind == "ends" else signal.SIGSTOP)
    said = error_of(lambda: layer(x))
    (folder / f"writing-{rank}").write_text(said)
    (folder / f"writing-{rank}").rename(folder / f"said-{rank}")


def wait(context) -> None:
    while not context.join():
        pass


@pytest.mark.parametrize(("kind", "world"), [("ends", 3), ("hangs", 2)])
def test_the_others_name_a_process_that(kind, world, tmp_path) -> None:
    context = run(multiply, world, tmp_path, tmp_path, kind, timeout=TIMEOUT, join=False)
    end = time.monotonic() + 100
    while len(list(tmp_path.glob("said-*"))) < world - 1 and time.monotonic() < end:
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    with pytest.raises(processes.ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        wait(context)
    for rank in [rank for rank in range(world) if rank != 1]:
        said = (tmp_path / f"said-{rank}").read_text()
        assert said.startswith(f"MarlinRowwiseParallel: rank 1 of {world} ended, or did not answer in 5 seconds: "), (
            said
        )
