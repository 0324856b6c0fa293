"""Times ways to add up a small tensor over the processes of one machine, as layers that are split by rows do.

    python benchmarks/process_sums.py [--processes 2 4] [--floats 2048] [--rounds 300]

Each process has one thread. The ways take turns, with a barrier before each. The table has the least and the median
time of rank 0. PyTorch offers the first three for CPUs. "shared memory" is a lower limit: a program that spins on
counters in memory that the processes share.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def exchange(x: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """Sends the tensor to every other process, and adds up all of them in the order of ranks."""
    parts = [x if peer == rank else torch.empty_like(x) for peer in range(count)]
    peers = [peer for peer in range(count) if peer != rank]
    waits = [dist.isend(x, peer) for peer in peers] + [dist.irecv(parts[peer], peer) for peer in peers]
    for wait in waits:
        if wait is not None:
            wait.wait()
    return torch.stack(parts).sum(0)


def serve(rank: int, count: int, folder: str, rounds: int, done: torch.Tensor, shared: torch.Tensor) -> None:
    """Runs in each process; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    x = torch.ones(shared.shape[-1])
    parts = [torch.empty_like(x) for _ in range(count)]
    step = 0

    def through_memory() -> torch.Tensor:
        nonlocal step
        step += 1
        shared[step % 2, rank].copy_(x)
        done[rank] = step
        while int(done.min()) < step:
            os.sched_yield()
        return shared[step % 2].sum(0)

    def gathered() -> torch.Tensor:
        dist.all_gather(parts, x)
        return torch.stack(parts).sum(0)

    ways: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "all_gather and sum": gathered,
        "isend and irecv with all": lambda: exchange(x, rank, count),
        "shared memory": through_memory,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            times[way].append(time.perf_counter() - begin)
    if rank == 0:
        cells = (f"{way} {min(t) * 1e6:.0f}, {statistics.median(t) * 1e6:.0f}" for way, t in times.items())
        print(f"{count} processes, {len(x)} floats, us least, median: " + "; ".join(cells), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--floats", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    for count in options.processes:
        done = torch.zeros(count, dtype=torch.int64).share_memory_()
        shared = torch.zeros(2, count, options.floats).share_memory_()
        with tempfile.TemporaryDirectory() as folder:
            processes.spawn(serve, (count, str(Path(folder)), options.rounds, done, shared), count)


if __name__ == "__main__":
    main()
