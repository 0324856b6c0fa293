"""Tensors that threads read in advance have the same bytes and errors as without threads, and need bounded memory."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import torch_marlin_metal.integrations.transformers  # noqa: F401
from tests.support import checkpoint_writers as writers
from tests.support.llama import FOLDERS
from torch_marlin_metal import convert, quantize_model
from torch_marlin_metal.checkpoints import checkpoint
from torch_marlin_metal.checkpoints.files import read_ahead
from torch_marlin_metal.checkpoints.files.read_ahead import ReadAhead
from torch_marlin_metal.checkpoints.files.safetensors import TensorInfo, read_header, read_tensor
from torch_marlin_metal.load import loader

SHAPES = [(3, 5), (64, 64), (0, 4), (1,), (700,), (2, 2, 2), (33, 7), (128,)]
LIMIT = 9000


@pytest.fixture
def groups(tmp_path) -> dict[int, list[TensorInfo]]:
    """Writes two files. Each returned group has tensors of both files; every fourth tensor is in no group."""
    infos: list[TensorInfo] = []
    for part in "ab":
        tensors = {
            f"{part}{i}.{j}": torch.randn(shape).to((torch.float32, torch.bfloat16, torch.float16)[(i + j) % 3])
            for i in range(6)
            for j, shape in enumerate(SHAPES)
        }
        save_file(tensors, tmp_path / f"{part}.safetensors")
        infos += read_header(tmp_path / f"{part}.safetensors")[0].values()
    kept = [info for index, info in enumerate(infos) if index % 4]
    return {number: kept[number::9] for number in range(9)}


def small_pieces(monkeypatch) -> None:
    """Makes batches and system calls so small that their boundaries are inside tensors of the test."""
    for name, size in {"BATCH_BYTES": 2000, "CALL_BYTES": 700, "CALL_BUFFERS": 3}.items():
        monkeypatch.setattr(read_ahead, name, size)


@pytest.fixture
def reading_threads() -> Callable[[], int]:
    """Returns a function that counts the reading threads that this test started and that have not ended."""
    before = set(threading.enumerate())
    return lambda: sum(
        thread.name.startswith(read_ahead.THREAD_NAME) for thread in threading.enumerate() if thread not in before
    )


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7, 8], [8, 0, 5, 1, 7, 2, 6, 3, 4]])
@pytest.mark.parametrize("most", [None, 37], ids=["whole calls", "short calls"])
def test_the_tensors_are_those_of_the_files(groups, order, most, monkeypatch) -> None:
    small_pieces(monkeypatch)
    if most:  # a system call may read fewer bytes than requested
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:most]], offset))
    ahead = ReadAhead(groups, LIMIT)
    found = 0
    for number in order:
        taken = ahead.take(number)
        found += bool(taken)
        for info in groups[number] if taken else ():
            expected = read_tensor(info)
            assert taken[info.name].dtype == expected.dtype
            assert torch.equal(taken[info.name], expected)
        assert ahead.take(number) == {}
    assert found == 9 if order == sorted(order) else found >= 5
    ahead.close()


def test_memory_is_bounded(groups, monkeypatch) -> None:
    """A thread starts a read only while the tensors that wait for the caller have fewer bytes than the limit."""
    small_pieces(monkeypatch)
    read: list[int] = []
    original = read_ahead._read
    monkeypatch.setattr(read_ahead, "_read", lambda batch: (read.extend(batch), original(batch))[1])
    sizes = {number: sum(info.nbytes for info in group) for number, group in groups.items()}
    assert sum(sizes.values()) > 5 * LIMIT
    ahead = ReadAhead(groups, LIMIT)
    for number in groups:
        ahead._threads.submit(int).result()  # ends after all earlier tasks have started
        waiting = [sizes[other] for other in read if other >= number]
        assert sum(waiting) - waiting[-1] < LIMIT
        assert ahead.take(number)
    assert sorted(read) == list(groups)
    ahead.close()


def test_closing_ends_the_threads(groups, reading_threads) -> None:
    ahead = ReadAhead(groups, LIMIT)
    assert reading_threads() > 0
    ahead.close()
    assert reading_threads() == 0
    assert ahead.take(0) == {}


@pytest.fixture
def directory(tmp_path) -> Path:
    writers.write_gptq(tmp_path, np.random.default_rng(7), 128, 24, 32, sym=False)
    return tmp_path


def test_a_layer_is_made_of_the_tensors_that_were_read_ahead(directory, monkeypatch) -> None:
    expected = next(convert.read_layers(directory))
    reader = convert.open_reader(directory)
    reader.read_ahead([0], LIMIT)
    asked: list[str] = []
    monkeypatch.setattr(checkpoint, "read_tensor", lambda info, *part: asked.append(info.name))
    weight = reader.read(0)
    assert not asked
    assert {name: tensor.tolist() for name, tensor in weight.tensors().items()} == {
        name: tensor.tolist() for name, tensor in expected.tensors().items()
    }
    reader.stop_reading_ahead()


def test_a_file_that_became_shorter_gives_the_usual_error(directory) -> None:
    reader = convert.open_reader(directory)
    file = directory / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(convert.CheckpointError) as usual:
        reader.read(0)
    reader.read_ahead([0], LIMIT)
    with pytest.raises(convert.CheckpointError, match=r"the file ends after \d+ of its") as error:
        reader.read(0)
    reader.stop_reading_ahead()
    assert str(error.value) == str(usual.value)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_from_pretrained_reads_packed_layers_ahead(folder, reading_threads, monkeypatch) -> None:
    asked: list[str] = []
    original = checkpoint.read_tensor
    monkeypatch.setattr(
        checkpoint, "read_tensor", lambda info, *part: (asked.append(info.name), original(info, *part))[1]
    )
    AutoModelForCausalLM.from_pretrained(folder)
    assert not asked
    assert reading_threads() == 0


def test_layers_that_the_model_lacks_make_room_for_others(tmp_path, monkeypatch) -> None:
    """A head that a base model does not read must not block other layers, even if memory has room for the head only."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    quantize_model(model, group_size=32)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "MOST_AHEAD", 1)
    monkeypatch.setattr(read_ahead, "BATCH_BYTES", 1)
    reader = convert.open_reader(tmp_path)
    head = reader.layer_names.index("lm_head")
    assert head < len(reader) - 1
    taken: dict[int, bool] = {}
    take = ReadAhead.take
    monkeypatch.setattr(ReadAhead, "take", lambda self, index: taken.setdefault(index, take(self, index)))
    AutoModel.from_pretrained(tmp_path)
    assert len(taken) == len(reader)
    order = list(taken)  # begins with the layers that the loader tries before the load, without the threads
    assert order.index(head) < len(order) - 1
    assert all(taken[index] for index in order[order.index(head) :])
