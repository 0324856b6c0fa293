"""Kills conversions, runs two at once, or fills the disk.

Each conversion must end with the right result or with none.
"""

import os
import random
import resource
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support import checkpoint_writers as writers
from torch_marlin_metal import convert
from torch_marlin_metal.checkpoints.journal import JOURNAL

SHARD_BYTES = 4000
REFUSED = 5  # exit code of a process whose conversion was refused
RUNS = 12


def source_of(rng: random.Random, path: Path) -> tuple[Path, dict[str, Any]]:
    """Writes a checkpoint of many small layers in a random format, and chooses the target format."""
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    path.mkdir()
    options: dict[str, Any] = {}
    kind = rng.choice(("gptq", "awq", "bitsandbytes", "hqq", "mlx", "gpt_oss"))
    match kind:
        case "gptq":
            writers.write_gptq(path, numbers, 64, 16, 32, version=2)
            options = {"target": rng.choice(("native", "awq", "compressed-tensors"))}
        case "awq":
            writers.write_awq(path, numbers, 64, 16, 32)
            options = rng.choice(({}, {"target": "gptq", "version": 2}))
        case "bitsandbytes":
            writers.write_bitsandbytes(path, numbers, 64, 16, 64)
        case "hqq":
            writers.write_hqq(path, numbers, 64, 16, 64)
        case "mlx":
            writers.write_mlx_affine(path, numbers, 64, 16, 32)
        case _:
            writers.write_gpt_oss(path, numbers, 96, 24, experts=20)
            return path, options
    one = load_file(path / "model.safetensors")
    many = {name.replace(writers.LAYER, f"l{i}"): tensor.clone() for i in range(20) for name, tensor in one.items()}
    many |= {f"norm{i}": torch.full((4,), float(i)) for i in range(20)}
    with safe_open(path / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file(many, path / "model.safetensors", metadata)
    return path, options


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def start(
    source: Path, destination: Path, options: dict[str, Any], slow: float, file_limit: int | None, sync: bool
) -> int:
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
            progress=lambda *_: time.sleep(slow), **options,
        )  # fmt: skip
        code = 0
    except (FileExistsError, convert.CheckpointError):
        code = REFUSED
    finally:
        os._exit(code)


def case(rng: random.Random, work: Path) -> Counter[str]:
    """Interrupts conversions into one destination, one after the other or two at once.

    Each result must have the bytes of an undisturbed conversion. The case then removes the result, so that the next run
    has work to do.
    """
    source, options = source_of(rng, work / "source")
    destination = work / "out"

    def convert_undisturbed(path: Path) -> dict[str, bytes]:
        convert.write_checkpoint(convert.open_reader(source), path, max_shard_bytes=SHARD_BYTES, **options)
        return contents(path)

    whole = convert_undisturbed(work / "whole")
    shutil.rmtree(work / "whole")
    kind = rng.choice(("kill", "two at once", "full disk"))
    counted: Counter[str] = Counter()
    for _ in range(RUNS):
        count = 2 if kind == "two at once" else 1
        limit = rng.choice((0, 500, 100_000, 263_000, 266_000)) if kind == "full disk" else None
        running = [
            start(source, destination, options, rng.random() * 0.004, limit, rng.random() < 0.2) for _ in range(count)
        ]
        victims = rng.sample(running, rng.randrange(1, count + 1)) if kind != "full disk" else []
        for victim in victims:
            time.sleep(rng.random() * 0.15)
            os.kill(victim, rng.choice((signal.SIGKILL, signal.SIGTERM)))
        for process in running:
            _, status = os.waitpid(process, 0)
            code = os.waitstatus_to_exitcode(status)
            assert code in (0, REFUSED, -signal.SIGKILL, -signal.SIGTERM), f"{kind}: exit code {code}"
            counted[f"{kind}: " + {0: "done", REFUSED: "refused"}.get(code, "killed")] += 1
        if destination.exists():
            if (destination / JOURNAL).exists():  # the process died after the rename; the next run removes the journal
                counted[f"{kind}: journal left"] += 1
                assert convert_undisturbed(destination).keys() == whole.keys(), (
                    f"{kind}: wrong files after a journal was left"
                )
            found = contents(destination)
            assert found == whole, f"{kind}: these files differ: {differences(found, whole)}"
            shutil.rmtree(destination)
    assert convert_undisturbed(destination) == whole
    left = sorted(path.name for path in work.iterdir())
    assert all(name in ("out", "source") or name.startswith(".out.partial.") for name in left), left
    return counted
