"""Runs a function in several processes of torch.distributed. On Linux, these are forks of one process."""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import DeviceMesh

from tests.support.programs import start_server

# Apple's frameworks do not work in a forked process
START_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"


def run(
    function: Callable[..., None],
    world: int,
    folder: Path,
    *arguments: Any,
    timeout: float = 120,
    join: bool = True,
) -> Any:
    """Runs `function(rank, world, *arguments)` in `world` processes of one thread each, connected by gloo.

    Args:
        function: a function of a module; an exception in any process fails the call.
        world: the number of processes.
        folder: the folder through which the processes connect; each call needs its own.
        *arguments: passed to `function`.
        timeout: seconds that a process waits for the others.
        join: whether to wait for the processes.

    Returns:
        If `join` is false, an object whose `join()` waits for the processes; otherwise None.
    """
    if START_METHOD == "forkserver":
        start_server()
    arguments = (function, world, str(folder / "rendezvous"), timeout, arguments)
    return processes.start_processes(_process, arguments, world, join, start_method=START_METHOD)


def _process(
    rank: int, function: Callable[..., None], world: int, file: str, timeout: float, arguments: tuple[Any, ...]
) -> None:
    from tests.support.preloaded import ask_for_mps  # only the fork server may import this module first

    ask_for_mps()  # if the function needs the device, the import of the function's module has created it
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    function(rank, world, *arguments)
    dist.destroy_process_group()  # after an error, this would wait for processes that wait for this one


def meshes(world: int) -> list[DeviceMesh]:
    """Returns the meshes of the first 1, 2, ... and `world` processes. Every process must call this function."""
    return [DeviceMesh("cpu", list(range(size))) for size in range(1, world + 1)]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "no error"
