"""Conversions during another conversion, after a power failure, into a link, or with a source that changes."""

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoint_writers as writers
from tests.support.checkpoint_writers import LAYER
from torch_marlin_metal import convert
from torch_marlin_metal.checkpoints import exporters, journal, writer
from torch_marlin_metal.checkpoints.journal import JOURNAL

SHARD_BYTES = 1500


def many_layers(path: Path, layers: int = 12) -> Path:
    """Writes GPTQ layers l0, l1, ... and a norm for each layer."""
    writers.write_gptq(path, np.random.default_rng(1), 64, 16, 32, version=2)
    one = load_file(path / "model.safetensors")
    tensors = {name.replace(LAYER, f"l{i}"): tensor.clone() for i in range(layers) for name, tensor in one.items()}
    save_file(tensors | {f"norm{i}": torch.full((4,), float(i)) for i in range(layers)}, path / "model.safetensors")
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def write(source: Path, destination: Path, **options) -> Path:
    return convert.write_checkpoint(convert.open_reader(source), destination, max_shard_bytes=SHARD_BYTES, **options)


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "source").mkdir()
    return many_layers(tmp_path / "source")


def interrupted(source: Path, destination: Path, at: int | None = 7, **options) -> Path:
    """Stops a conversion after `at` items, or after the last one, and returns the folder of its partial result."""

    def interrupt(name: str, done: int, count: int) -> None:
        if done == (at or count):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(source, destination, progress=interrupt, **options)
    return destination.with_name(destination.name + ".partial")


def test_a_second_conversion_is_refused_and_the_first_goes_on(source, tmp_path) -> None:
    refused = []

    def second(name: str, done: int, count: int) -> None:
        if done not in (1, 9):
            return
        with pytest.raises(FileExistsError, match=r"out\.partial: another conversion is writing it") as caught:
            write(source, tmp_path / "out", **({} if done == 1 else {"target": "gptq", "version": 2}))
        refused.append(caught)

    whole = contents(write(source, tmp_path / "whole"))
    assert contents(write(source, tmp_path / "out", progress=second)) == whole
    assert len(refused) == 2


def test_the_lock_ends_with_its_process(source, tmp_path) -> None:
    started = multiprocessing.get_context("fork").Event()

    def run() -> None:
        torch.set_num_threads(1)
        write(
            source, tmp_path / "out", progress=lambda n, done, c: done > 5 and (started.set(), threading.Event().wait())
        )

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    assert started.wait(60)
    with pytest.raises(FileExistsError, match="another conversion is writing it"):
        write(source, tmp_path / "out")
    child.kill()
    child.join()
    assert contents(write(source, tmp_path / "out")) == contents(write(source, tmp_path / "whole"))


def test_many_conversions_at_once_make_one_result(source, tmp_path) -> None:
    whole = contents(write(source, tmp_path / "whole"))
    results: list[object] = []

    def run() -> None:
        try:
            results.append(write(source, tmp_path / "out"))
        except FileExistsError as error:
            results.append(error)

    for _ in range(5):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert contents(tmp_path / "out") == whole
        shutil.rmtree(tmp_path / "out")
    assert len(results) == 20
    assert sum(isinstance(result, Path) for result in results) >= 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "whole"]


def hole_at_the_front(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.write(bytes(262_152))


def shorter(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def with_other_names(shard: Path) -> None:
    raw = shard.read_bytes()
    shard.write_bytes(raw.replace(b'"l0.b_packed"', b'"l9.b_packed"'))


@pytest.mark.parametrize("damage", [hole_at_the_front, shorter, with_other_names, Path.unlink])
def test_a_shard_that_a_power_failure_damaged_is_written_again(source, tmp_path, damage) -> None:
    work = interrupted(source, tmp_path / "out")
    damage(work / "model-00001.safetensors")
    assert contents(write(source, tmp_path / "out")) == contents(write(source, tmp_path / "whole"))


def test_with_sync_a_shard_is_on_the_disk_before_the_journal_names_it(source, tmp_path, monkeypatch) -> None:
    events: list[str] = []
    fsync, add = os.fsync, journal.Journal.add
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd))[1]
    )
    monkeypatch.setattr(
        journal.Journal, "add", lambda self, shard, *rest: (events.append(f"named {shard}"), add(self, shard, *rest))[1]
    )
    write(source, tmp_path / "out", sync=True)
    named = [event for event in events if event.startswith("named ")]
    assert len(named) > 3
    for event in named:
        before = events[: events.index(event)]
        assert event.removeprefix("named ") in before
        assert before[-1] == "out.partial"
        assert events[events.index(event) + 1] == JOURNAL
    events.clear()
    write(source, tmp_path / "fast")
    assert [event for event in events if not event.startswith("named ")] == []


JOURNALS: dict[str, Callable[[list[bytes]], bytes]] = {
    "empty": lambda lines: b"",
    "a list": lambda lines: b"[]\n",
    "a number": lambda lines: b"3\n",
    "no shard's name": lambda lines: lines[0] + b'\n{"items": 1}\n',
    "items are no number": lambda lines: lines[0] + b"\n" + lines[1].replace(b'"items":', b'"items":"x","y":') + b"\n",
    "a file elsewhere": lambda lines: lines[0] + b"\n" + lines[1].replace(b"model-00001", b"../../../etc/x") + b"\n",
    "deep": lambda lines: lines[0] + b"\n" + b"[" * 100_000 + b"\n",
    "no text": lambda lines: lines[0] + b"\n\xff\xfe\n",
    "a torn line": lambda lines: b"\n".join(lines[:2]) + b"\n" + lines[2][:50],
}


@pytest.mark.parametrize("case", JOURNALS)
def test_a_damaged_journal_starts_anew_or_goes_on(source, tmp_path, case) -> None:
    work = interrupted(source, tmp_path / "out", at=11)
    lines = (work / JOURNAL).read_bytes().split(b"\n")
    assert len(lines) > 3
    (work / JOURNAL).write_bytes(JOURNALS[case](lines))
    positions: list[int] = []
    write(source, tmp_path / "out", progress=lambda n, done, c: positions.append(done))
    assert (positions[0] > 1) == (case == "a torn line")
    assert contents(tmp_path / "out") == contents(write(source, tmp_path / "whole"))


@pytest.mark.parametrize("target", ["native", "gptq", "compressed-tensors"])
def test_the_journal_grows_by_what_is_new(tmp_path, target) -> None:
    """Each shard appends only its own lines to the journal.

    If each shard rewrote the whole journal, 8000 layers would take 15 times as long as 2000.
    """
    sizes = {}
    for layers in (20, 80):
        (tmp_path / f"{layers}").mkdir()
        source = many_layers(tmp_path / f"{layers}", layers)
        options = {"version": 2} if target == "gptq" else {}
        work = interrupted(source, tmp_path / f"out{layers}", None, target=target, **options)
        sizes[layers] = (work / JOURNAL).stat().st_size
    assert sizes[80] < 4.5 * sizes[20]


@pytest.mark.parametrize("name", ["tokenizer.json", "notes.md", "merges.txt"])
def test_a_link_beside_the_weights_is_not_followed_out_of_the_checkpoint(source, tmp_path, name) -> None:
    (tmp_path / "secret").write_text("key")
    (source / name).symlink_to(tmp_path / "secret")
    with pytest.raises(convert.CheckpointError, match=rf"{name}: a symbolic link that leads out of the checkpoint"):
        write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (source / name).unlink()
    (source / "own").write_text("{}")
    (source / name).symlink_to("own")
    assert (write(source, tmp_path / "out") / name).read_text() == "{}"


@pytest.mark.parametrize("name", ["l3.b_packed", "l0.packed_format"])
def test_a_name_that_the_writer_uses_itself(source, tmp_path, name) -> None:
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {name: torch.ones(3)}, source / "model.safetensors")
    with pytest.raises(convert.CheckpointError, match=f"source: two tensors would have the name '{name}'"):
        write(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("kind", ["replaced", "written"])
def test_a_source_that_changes_in_the_middle(source, tmp_path, kind) -> None:
    file = source / "model.safetensors"
    raw, times = file.read_bytes(), file.stat()

    def change(name: str, done: int, count: int) -> None:
        if done != 5:
            return
        if kind == "replaced":
            (source / "new").write_bytes(raw[:-8] + bytes(8))
            os.utime(source / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
            (source / "new").replace(file)
        else:
            file.write_bytes(raw[:-8] + bytes(8))

    with pytest.raises(convert.CheckpointError, match="source: a file was changed while it was converted"):
        write(source, tmp_path / "out", progress=change)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_directories_of_others_stay(source, tmp_path) -> None:
    for name in ("out.partial.new", ".out.partial.new", ".out.exporting", ".out.calibrated"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("")
    write(source, tmp_path / "out")
    assert len(list(tmp_path.glob("*/precious"))) == 4


def test_a_dangling_link_is_found_before_the_work(source, tmp_path) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="out: exists already"):
        write(source, tmp_path / "out", progress=lambda *_: pytest.fail("worked"))
    assert not (tmp_path / "out.partial").exists()


def test_a_directory_that_cannot_be_made(source, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(convert.CheckpointError, match=r"out\.partial: cannot be written \(Not a directory\)"):
        write(source, tmp_path / "file" / "out")


def test_an_unknown_version_is_found_before_the_work(source, tmp_path) -> None:
    with pytest.raises(ValueError, match="version: expected 1 or 2, got 3"):
        write(source, tmp_path / "out", target="gptq", version=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_settings_of_an_interrupted_export_are_those_of_a_whole_one(source, tmp_path) -> None:
    for target in exporters.EXPORTERS:
        options = {"target": target} | ({"version": 2} if target == "gptq" else {})
        whole = write(source, tmp_path / f"whole-{target}", **options)
        work = interrupted(source, tmp_path / f"out-{target}", None, **options)
        assert len((work / JOURNAL).read_bytes().split(b"\n")) > 3
        again = write(source, tmp_path / f"out-{target}", **options)
        assert json.loads((again / "config.json").read_text()) == json.loads((whole / "config.json").read_text())
        assert (again / writer.INDEX).read_text() == (whole / writer.INDEX).read_text()
