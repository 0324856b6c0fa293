"""The package's own format on disk keeps every bit. After a failure, no incomplete file looks complete."""

import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support import checkpoint_writers as writers
from tests.support.checkpoint_writers import LAYER
from tests.support.fixture_layers import FOLDERS, key, source_of
from torch_marlin_metal import MarlinLinear, convert, quantize_weight
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.files import shard_writer

JOURNAL = ".torch_marlin_metal.json"


def large_checkpoint(path: Path, layers: int = 12) -> Path:
    """Writes GPTQ layers, a norm for each layer, and a table in E4M3."""
    writers.write_gptq(path, np.random.default_rng(0), 256, 64, 32, sym=True, act_order=True)
    held = {name.removeprefix(LAYER): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    tensors = {
        f"l.{i}{name}": (tensor + i if name == ".qweight" else tensor)
        for i in range(layers)
        for name, tensor in held.items()
    }
    tensors |= {f"norm.{i}.weight": torch.full((64,), float(i)) for i in range(layers)}
    tensors["codes.weight"] = torch.arange(64).to(torch.float8_e4m3fn)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "tokenizer.json").write_text("{}")
    (path / "modeling.py").write_text("raise SystemExit")
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.mark.filterwarnings("ignore:.*raw zero points of 15")
@pytest.mark.parametrize("folder", FOLDERS, ids=key)
def test_every_layer_comes_back_with_the_same_bits_also_in_an_empty_layer(tmp_path, folder) -> None:
    (before,) = convert.read_layers(source_of(folder))
    path = convert.write_checkpoint(convert.open_reader(source_of(folder)), tmp_path / "out")
    reader = convert.open_reader(path)
    (after,) = reader
    assert reader.format.name == "native"
    assert (after.name, after.weight_format, after.group_size) == (before.name, before.weight_format, before.group_size)
    expected = before.tensors()
    if before.weight_format == "nvfp4" and before.global_scale is None:
        expected["global_scale"] = torch.ones(1)
    assert after.tensors().keys() == expected.keys()
    for name, tensor in after.tensors().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.view(torch.uint8), expected[name].contiguous().view(torch.uint8))
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    ((name, entry),) = settings["layers"].items()
    dtypes = {
        key: getattr(torch, entry.pop(key)) for key in ("scale_dtype", "zeros_dtype", "super_dtype") if key in entry
    }
    layer = MarlinLinear(**entry, **dtypes)
    tensors = load_file(path / "model-00001.safetensors")
    layer.load_state_dict({key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items()}, strict=True)
    torch.testing.assert_close(layer.dequantize().t(), after.dequantize(), rtol=0, atol=0, equal_nan=True)


def test_shards_other_tensors_and_small_files(tmp_path) -> None:
    source = large_checkpoint(tmp_path / "source")
    calls = []
    path = convert.write_checkpoint(
        convert.open_reader(source), tmp_path / "out", max_shard_bytes=30_000, progress=lambda *args: calls.append(args)
    )
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    held = {}
    for shard in shards:
        with safe_open(path / shard, "pt") as file:
            held |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert (path / shard).stat().st_size < 30_000 + shard_writer.HEADER_BYTES + 8
    assert held.keys() == index["weight_map"].keys()
    assert held["codes.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(held["norm.3.weight"], torch.full((64,), 3.0))
    assert sorted(file.name for file in path.iterdir()) == sorted(
        ["README.md", "config.json", "model.safetensors.index.json", "tokenizer.json", *shards]
    )
    assert [(done, count) for _, done, count in calls] == [(i + 1, 25) for i in range(25)]
    before = {weight.name: weight for weight in convert.read_layers(source)}
    after = {weight.name: weight for weight in convert.read_layers(path)}
    assert before.keys() == after.keys()
    for name, weight in after.items():
        assert torch.equal(weight.dequantize(), before[name].dequantize())


def test_torch_has_its_threads_again_after_a_conversion(tmp_path) -> None:
    source, seen = large_checkpoint(tmp_path / "source"), []

    def progress(*_: object) -> None:
        seen.append(torch.get_num_threads())
        if len(seen) > 2:
            raise KeyboardInterrupt

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyboardInterrupt):
            convert.write_checkpoint(convert.open_reader(source), tmp_path / "out", progress=progress)
        assert (seen, torch.get_num_threads()) == ([1, 1, 1], 3)
    finally:
        torch.set_num_threads(before)


def test_layers_that_cannot_be_packed_are_stored_as_floats_on_request(tmp_path) -> None:
    expected = writers.write_gptq(tmp_path / "source", np.random.default_rng(0), 64, 16, 8, version=2)
    with pytest.raises(convert.UnsupportedFormat):
        convert.write_checkpoint(convert.open_reader(tmp_path / "source"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    reader = convert.open_reader(tmp_path / "source", on_unsupported="dequantize")
    path = convert.write_checkpoint(reader, tmp_path / "out")
    np.testing.assert_array_equal(load_file(path / "model-00001.safetensors")[f"{LAYER}.weight"].numpy(), expected)


@pytest.mark.skipif(sys.platform == "darwin", reason="fork without exec is unsafe with Apple's frameworks")
def test_killed_at_random_points_and_resumed(tmp_path) -> None:
    source, destination = large_checkpoint(tmp_path / "source"), tmp_path / "out"

    def start(path: Path) -> int:
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)  # after a fork, the child has no other threads
                convert.write_checkpoint(convert.open_reader(source), path, max_shard_bytes=30_000)
                os._exit(0)
            finally:
                os._exit(1)
        return child

    started = time.monotonic()  # times a child, which is several times slower than this process
    os.waitpid(start(tmp_path / "whole"), 0)
    seconds, expected = time.monotonic() - started, contents(tmp_path / "whole")
    rng = random.Random(0)
    kills = resumed = 0
    while kills < 5:
        while not destination.exists():
            child = start(destination)
            time.sleep(rng.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
            kills += os.WIFSIGNALED(status)
            shards = list((tmp_path / "out.partial").glob("model-*.safetensors"))
            resumed += bool(shards)
            for shard in shards:
                load_file(shard)  # the file is complete, although the process was killed
        if (destination / JOURNAL).exists():
            convert.write_checkpoint(convert.open_reader(source), destination)
        assert contents(destination) == expected
        shutil.rmtree(destination)
    assert resumed > 0


def write_interrupted(source: Path, path: Path, **options) -> None:
    """Converts a checkpoint to `path`, and stops after nine layers."""

    def interrupt(name: str, done: int, count: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.write_checkpoint(
            convert.open_reader(source), path, max_shard_bytes=30_000, progress=interrupt, **options
        )


def test_a_run_goes_on_after_the_last_complete_shard(tmp_path) -> None:
    source = large_checkpoint(tmp_path / "source")
    whole = contents(convert.write_checkpoint(convert.open_reader(source), tmp_path / "a", max_shard_bytes=30_000))
    write_interrupted(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    partial = sorted(file.name for file in (tmp_path / "b.partial").iterdir())
    assert partial[0] == JOURNAL
    assert all(name.startswith("model-") and name.endswith(".safetensors") for name in partial[1:])
    positions = []
    convert.write_checkpoint(
        convert.open_reader(source),
        tmp_path / "b",
        max_shard_bytes=30_000,
        progress=lambda n, d, c: positions.append(d),
    )
    assert positions[0] > 1
    assert contents(tmp_path / "b") == whole
    assert not (tmp_path / "b.partial").exists()


@pytest.mark.parametrize(("target", "options"), [("gptq", {"version": 2}), ("compressed-tensors", {})])
def test_an_export_goes_on_too(tmp_path, target, options) -> None:
    source = large_checkpoint(tmp_path / "source")
    write_interrupted(source, tmp_path / "b", target=target, **options)
    reader, positions = convert.open_reader(source), []
    options |= {"target": target, "max_shard_bytes": 30_000}
    whole = contents(convert.write_checkpoint(reader, tmp_path / "a", **options))
    convert.write_checkpoint(reader, tmp_path / "b", progress=lambda n, d, c: positions.append(d), **options)
    assert positions[0] > 1
    assert contents(tmp_path / "b") == whole
    for weight, other in zip(reader, convert.read_layers(tmp_path / "b"), strict=True):
        assert torch.equal(weight.dequantize(), other.dequantize())


def test_a_target_that_is_unknown_or_refuses_leaves_nothing(tmp_path) -> None:
    reader = convert.open_reader(large_checkpoint(tmp_path / "source"))
    with pytest.raises(ValueError, match="target: expected one of native, gptq, awq, compressed-tensors, got 'x'"):
        convert.write_checkpoint(reader, tmp_path / "out", target="x")
    with pytest.raises(convert.UnsupportedFormat, match="not exported to AWQ without loss: it has act-order"):
        convert.write_checkpoint(reader, tmp_path / "out", target="awq", max_shard_bytes=30_000)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_another_source_starts_anew(tmp_path) -> None:
    source = large_checkpoint(tmp_path / "source")
    write_interrupted(source, tmp_path / "b")
    tensors = load_file(source / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "norm" not in name}, source / "model.safetensors")
    path = convert.write_checkpoint(convert.open_reader(source), tmp_path / "b", max_shard_bytes=30_000)
    assert contents(path) == contents(
        convert.write_checkpoint(convert.open_reader(source), tmp_path / "a", max_shard_bytes=30_000)
    )


class FullDisk:
    """A stream that fails after some writes, as on a full disk."""

    def __init__(self, stream, writes: int) -> None:
        self._stream, self._left = stream, writes

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, data) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._stream.write(data)


@pytest.mark.parametrize("writes", [0, 1, 3])
def test_a_full_disk_names_the_file_and_leaves_no_half_of_it(tmp_path, monkeypatch, writes) -> None:
    source = large_checkpoint(tmp_path / "source")
    original = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, mode="r", *a, **k: (
            FullDisk(original(self, mode, *a, **k), writes) if mode == "wb" else original(self, mode, *a, **k)
        ),
    )
    with pytest.raises(convert.CheckpointError, match=r"model-00001\.safetensors: .*cannot be written \(No space left"):
        convert.write_checkpoint(convert.open_reader(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
    monkeypatch.undo()
    convert.write_checkpoint(convert.open_reader(source), tmp_path / "out")


@pytest.mark.parametrize("writes", [0, 1, 3])
def test_short_memory_in_the_writing_thread_names_the_file_and_leaves_no_half_of_it(
    tmp_path, monkeypatch, writes
) -> None:
    """A batch that the thread loses would leave a hole in a shard whose header claims that the shard is complete."""
    source = large_checkpoint(tmp_path / "source")
    original, count = shard_writer.ShardWriter._write_all, iter(range(10**6))

    def write_all(writer, data) -> None:
        if next(count) == writes:
            raise MemoryError
        original(writer, data)

    monkeypatch.setattr(shard_writer.ShardWriter, "_write_all", write_all)
    monkeypatch.setattr(shard_writer, "BATCH_BYTES", 1 << 13)  # small batches, so that both early and late batches fail
    with pytest.raises(convert.CheckpointError, match=r"model-00001\.safetensors: cannot be written \(no memory\)"):
        convert.write_checkpoint(convert.open_reader(source), tmp_path / "out")
    assert next(count) > writes
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
    monkeypatch.undo()
    convert.write_checkpoint(convert.open_reader(source), tmp_path / "out")


def test_names_that_fit_no_header(tmp_path) -> None:
    source = large_checkpoint(tmp_path / "source", layers=1)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"\u00e9" * 60_000: torch.ones(1)}, source / "model.safetensors")
    with pytest.raises(convert.CheckpointError, match="the names of its tensors do not fit into a header"):
        convert.write_checkpoint(convert.open_reader(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_existing_destinations_are_left_alone(tmp_path) -> None:
    source = large_checkpoint(tmp_path / "source")
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out: exists already"):
        convert.write_checkpoint(convert.open_reader(source), tmp_path / "out")
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial/precious").write_text("")
    with pytest.raises(FileExistsError, match="is not an unfinished conversion"):
        convert.write_checkpoint(convert.open_reader(source), tmp_path / "other")
    assert (tmp_path / "other.partial/precious").exists()


def native(tmp_path: Path) -> Path:
    return convert.write_checkpoint(convert.open_reader(large_checkpoint(tmp_path / "source", 1)), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version 2 is not read; known: 1"),
        ({"layers": {}}, r"packed_format': uint4b8, 32 does not agree with the settings' \('', None\)"),
        ({"layers": []}, "layers: expected an object, got "),
    ],
)
def test_settings_that_do_not_fit(tmp_path, change, message) -> None:
    path = native(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(convert.CheckpointError, match=message):
        list(convert.read_layers(path))


@pytest.mark.parametrize(
    ("role", "tensor", "message"),
    [
        ("packed_format", torch.tensor([1, 99, 32], dtype=torch.int32), r"\.packed_format': expected version 1"),
        ("packed_format", torch.tensor([1, 0], dtype=torch.int32), r"\.packed_format': expected shape \[3\]"),
        ("scales", torch.ones(8, 63).half(), r"\.scales': scales: expected shape \[8, 64\]"),
        ("scales", torch.full((8, 64), torch.nan).half(), r"\.scales': scales: expected finite"),
        ("perm", torch.zeros(256, dtype=torch.int32), r"\.perm': perm: expected a permutation"),
        ("zeros", torch.zeros(8, 64, dtype=torch.uint8), r"\.zeros': zeros: expected None for uint4b8"),
    ],
)
def test_damaged_layers(tmp_path, role, tensor, message) -> None:
    path = native(tmp_path)
    tensors = load_file(path / "model-00001.safetensors") | {f"l.0.{role}": tensor}
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"][f"l.0.{role}"] = "model-00001.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensors, path / "model-00001.safetensors")
    with pytest.raises(convert.CheckpointError, match=message):
        list(convert.read_layers(path))


def test_a_layer_of_the_settings_that_the_files_lack_is_an_error(tmp_path) -> None:
    path = convert.write_checkpoint(open_two(tmp_path), tmp_path / "own")
    (file,) = path.glob("*.safetensors")
    state = load_file(file)
    save_file({name: tensor for name, tensor in state.items() if not name.startswith("up.")}, file)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="the files lack the layer 'up' of the settings"):
        convert.open_reader(path)


def test_tensors_outside_the_layers_may_be_named_like_their_parts(tmp_path) -> None:
    path = convert.write_checkpoint(open_two(tmp_path), tmp_path / "own")
    (file,) = path.glob("*.safetensors")
    save_file(load_file(file) | {"gate.global_scale": torch.ones(1)}, file)
    (path / "model.safetensors.index.json").unlink()
    assert [name for name, _ in convert.open_reader(path).other_tensors()] == ["gate.global_scale"]


def open_two(folder: Path) -> convert.CheckpointReader:
    layers = [quantize_weight(torch.randn(64, 64), "uint4", 32) for _ in range(2)]
    for layer, name in zip(layers, ("down", "up"), strict=True):
        layer.name = name
    convert.export_checkpoint(layers, folder / "gptq", "gptq", version=2)
    return convert.open_reader(folder / "gptq")
