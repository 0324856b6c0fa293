"""Conversions that are killed, that run twice at once, or that fill the disk give the right result or no result."""

import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoint_writers as writers
from torch_marlin_metal import convert

SHARD_BYTES = 4000
CHANGED_MIND = 5  # exit code of a process that was refused
RUNS = 12


def source_of(rng: random.Random, path: Path) -> Path:
    """Makes a checkpoint of many small layers in one of several formats."""
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    path.mkdir()
    kind = rng.choice(("gptq", "awq", "gpt_oss"))
    if kind == "gptq":
        writers.write_gptq(path, numbers, 64, 16, 32, version=2)
    elif kind == "awq":
        writers.write_awq(path, numbers, 64, 16, 32)
    else:
        writers.write_gpt_oss(path, numbers, 96, 24, experts=20)
        return path
    one = load_file(path / "model.safetensors")
    many = {name.replace(writers.LAYER, f"l{i}"): tensor.clone() for i in range(20) for name, tensor in one.items()}
    save_file(many | {f"norm{i}": torch.full((4,), float(i)) for i in range(20)}, path / "model.safetensors")
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def start(source: Path, destination: Path, slow: float, file_limit: int | None = None, sync: bool = False) -> int:
    """Starts a conversion in a new process, which sleeps `slow` seconds after each tensor. Returns the process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        if file_limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
        convert.write_checkpoint(
            convert.open_reader(source), destination, max_shard_bytes=SHARD_BYTES, sync=sync,
            progress=lambda *_: time.sleep(slow),
        )  # fmt: skip
        code = 0
    except (FileExistsError, convert.CheckpointError):
        code = CHANGED_MIND
    finally:
        os._exit(code)


def case(rng: random.Random, work: Path) -> str:
    """Interrupts conversions into one destination until one conversion ends.

    The files must equal those of an undisturbed conversion.
    """
    source = source_of(rng, work / "source")
    whole = contents(convert.write_checkpoint(convert.open_reader(source), work / "whole", max_shard_bytes=SHARD_BYTES))
    shutil.rmtree(work / "whole")
    kind = rng.choice(("kill", "two at once", "full disk"))
    destination = work / "out"
    for _ in range(RUNS):
        count = 2 if kind == "two at once" else 1
        limit = rng.choice((0, 500, 100_000, 263_000, 266_000)) if kind == "full disk" else None
        running = [start(source, destination, rng.random() * 0.004, limit, rng.random() < 0.2) for _ in range(count)]
        victims = rng.sample(running, rng.randrange(1, count + 1)) if kind != "full disk" else []
        for victim in victims:
            time.sleep(rng.random() * 0.15)
            os.kill(victim, rng.choice((signal.SIGKILL, signal.SIGTERM)))
        for process in running:
            _, status = os.waitpid(process, 0)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) in (0, CHANGED_MIND), f"{kind}: exit code {os.WEXITSTATUS(status)}"
        if destination.exists():
            assert contents(destination) == whole, kind
    convert.write_checkpoint(convert.open_reader(source), destination, max_shard_bytes=SHARD_BYTES) if not (
        destination.exists()
    ) else None
    assert contents(destination) == whole
    left = sorted(path.name for path in work.iterdir())
    assert all(name in ("out", "source") or name.startswith(".out.partial.") for name in left), left
    return kind
