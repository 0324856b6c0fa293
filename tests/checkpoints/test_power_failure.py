"""Simulates power failures at every moment of a conversion. Each failure loses some of the unsynced writes."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoint_writers as writers
from tests.support.lost_writes import Event, Recording, kept, lay_out, replay
from torch_marlin_metal import convert
from torch_marlin_metal.checkpoints.journal import JOURNAL

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info < (3, 11),
    reason="finds the paths of open files in /proc, and pathlib of Python 3.10 keeps os's functions to itself",
)
SHARD_BYTES = 1500


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("source")
    writers.write_gptq(path, np.random.default_rng(1), 64, 16, 32, version=2)
    one = load_file(path / "model.safetensors")
    many = {name.replace(writers.LAYER, f"l{i}"): tensor.clone() for i in range(3) for name, tensor in one.items()}
    save_file(many | {"norm": torch.ones(4)}, path / "model.safetensors")
    (path / "tokenizer.json").write_text("{}")
    return path


def write(source: Path, destination: Path, **options: Any) -> dict[str, bytes]:
    convert.write_checkpoint(convert.open_reader(source), destination, max_shard_bytes=SHARD_BYTES, **options)
    return contents(destination)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != JOURNAL}


def record(source: Path, folder: Path, *, sync: bool) -> list[Event]:
    """Returns the events of a conversion, after checking that a full replay gives the converted folder."""
    folder.mkdir()
    recording = Recording(folder)
    with recording.watch():
        write(source, folder / "out", sync=sync)
    tree = kept(replay(recording.events), "nothing", random.Random(0))
    assert tree == {"out": contents(folder / "out")}
    return recording.events


def failures(events: list[Event], losses: tuple[str, ...], seeds: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """Returns the folders that a power failure may leave, each with a text that names the moment and the loss."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for count in range(len(events) + 1):
        root = replay(events[:count])
        for loss in losses:
            for seed in range(seeds if loss == "some" else 1):
                tree = kept(root, loss, random.Random(f"{count}-{seed}"))
                assert isinstance(tree, dict)
                found.setdefault(repr(tree), (f"after {count} events, loss of {loss} ({seed})", tree))
    return list(found.values())


def test_with_sync_a_destination_is_whole_and_a_later_run_ends(source, tmp_path, everything) -> None:
    whole = write(source, tmp_path / "whole")
    assert len([name for name in whole if name.endswith(".safetensors")]) == 2
    events = record(source, tmp_path / "recorded", sync=True)
    cases = failures(
        events, ("nothing", "bytes", "blocks", "names", "everything", "some"), seeds=50 if everything else 4
    )
    assert len(cases) > 60
    finished = resumed = 0
    for number, (when, tree) in enumerate(cases):
        folder = lay_out(tree, tmp_path / str(number))
        if (folder / "out").exists():
            assert contents(folder / "out") == whole, when
            finished += 1
        if not (folder / "out").exists() or (folder / "out" / JOURNAL).exists():
            positions: list[int] = []
            assert write(source, folder / "out", progress=lambda n, done, c, p=positions: p.append(done)) == whole, when
            resumed += bool(positions) and positions[0] > 1
    assert finished >= 2
    assert resumed > 10, "no later run went on after the shards on the disk"


def test_with_sync_no_finished_shard_is_converted_again(source, tmp_path) -> None:
    """If the journal's line for a shard is on the disk, so is the shard."""
    events = record(source, tmp_path / "recorded", sync=True)
    lines = [
        count + 1
        for count, event in enumerate(events)
        if event == ("sync", f"out.partial/{JOURNAL}") and events[count - 1][0] == "write"
    ]
    assert len(lines) == 2
    layers_of_a_shard = []
    for number, count in enumerate(lines):
        tree = kept(replay(events[:count]), "everything", random.Random(0))
        assert isinstance(tree, dict)
        positions: list[int] = []
        folder = lay_out(tree, tmp_path / str(number))
        write(source, folder / "out", progress=lambda n, done, c, p=positions: p.append(done))
        layers_of_a_shard.append(positions[:1])
    assert layers_of_a_shard == [[3], []]


def test_without_sync_lost_files_are_refused_or_written_again(source, tmp_path) -> None:
    """Without sync, a power failure may leave a file's name without its bytes. Such a file is not read as a weight."""
    whole = write(source, tmp_path / "whole")
    events = record(source, tmp_path / "recorded", sync=False)
    assert not [event for event in events if event[0] == "sync"]
    refused = 0
    for number, (when, tree) in enumerate(failures(events, ("nothing", "bytes", "blocks", "weights", "everything"))):
        folder = lay_out(tree, tmp_path / str(number))
        if not (folder / "out").exists():
            assert write(source, folder / "out") == whole, when
            continue
        try:
            for _ in convert.read_layers(folder / "out"):
                pass
        except convert.CheckpointError:
            refused += 1
        else:
            assert contents(folder / "out") == whole, when
    assert refused >= 2
