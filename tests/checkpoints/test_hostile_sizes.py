"""A file whose header states larger sizes than the file has is refused before the reader uses memory or time."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints.test_bad_files import string
from tests.support import checkpoint_writers as writers
from tests.support.checkpoint_damage import GPTQ, configure, fails
from torch_marlin_metal import convert
from torch_marlin_metal.checkpoints.files import safetensors
from torch_marlin_metal.checkpoints.files.gguf import SkippedArray, read_gguf

GPT_OSS: dict[str, Any] = {"quant_method": "mxfp4"}
MLX = {"quant_method": "mlx", "bits": 4, "mode": "mxfp4"}


def without_bytes(path: Path, settings: dict[str, Any], shapes: dict[str, list[int]]) -> None:
    configure(path, settings)
    entry = {name: {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps(entry).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize("experts", [0, 10**9, 2**55])
@pytest.mark.parametrize(
    ("settings", "names"),
    [(GPT_OSS, ("a_blocks", "a_scales")), (MLX, ("a.scales", "a.weight"))],
    ids=["gpt-oss", "mlx"],
)
def test_experts_without_bytes(tmp_path, settings, names, experts) -> None:
    tail = {"a_blocks": [0, 1, 16]}
    without_bytes(tmp_path, settings, {name: [experts, *tail.get(name, [0, 1])] for name in names})
    fails(tmp_path, rf"tensor '{names[0]}': expected experts of at least one byte, got \[{experts}, .* in 0 bytes")


@pytest.mark.parametrize("shape", [[0, 2**63], [2**40, 2**40, 0], [10**100, 0]], ids=str)
def test_sizes_without_elements(tmp_path, shape) -> None:
    without_bytes(tmp_path, GPTQ, {"a.other": shape, "a.qweight": [0, 8]})
    fails(tmp_path, r"tensor 'a\.other': expected sizes that span at most \d+ elements, got \[")


def test_a_shard_of_a_name_that_no_file_system_takes(tmp_path) -> None:
    configure(tmp_path, GPTQ)
    index = {"weight_map": {"a.qweight": "x" * 5000 + ".safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(tmp_path, r"tensor 'a\.qweight': its shard x{255} is missing")


PICKLED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "an expanded tensor of 4 TB": (lambda: torch.zeros(1).expand(1 << 40), r"expected 4398046511104 bytes .* holds 4"),
    "a meta tensor": (lambda: torch.zeros(1 << 40, device="meta"), "got Tensor of torch.strided on meta"),
    "a sparse tensor": (lambda: torch.zeros(8, 8).to_sparse(), "got Tensor of torch.sparse_coo on cpu"),
}


@pytest.mark.parametrize("case", PICKLED)
def test_pickled_tensors_without_their_bytes(tmp_path, case) -> None:
    make, message = PICKLED[case]
    configure(tmp_path, GPTQ)
    torch.save({"a.qweight": make()}, tmp_path / "model.bin")
    fails(tmp_path, rf"model\.bin: 'a\.qweight': .*{message}", allow_pickle=True)


def test_pickled_views_of_one_memory_are_not_copied_before_they_are_read(tmp_path) -> None:
    writers.write_gptq(tmp_path, np.random.default_rng(1), 64, 16, 32, version=2)
    expected = next(convert.read_layers(tmp_path))
    tensors = {name: tensor.t().contiguous().t() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "model.bin")
    reader = convert.open_reader(tmp_path, allow_pickle=True)
    assert not all(tensor.is_contiguous() for tensor in reader.checkpoint.loaded.values())
    assert torch.equal(next(iter(reader)).b_packed, expected.b_packed)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_a_tensor_that_memory_does_not_hold(tmp_path, monkeypatch, error) -> None:
    writers.write_gptq(tmp_path, np.random.default_rng(1), 64, 16, 32, version=2)
    reader = convert.open_reader(tmp_path)

    def no_memory(*_: object, **__: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(safetensors.torch, "empty", no_memory)
    with pytest.raises(convert.CheckpointError, match=r"model\.safetensors: tensor '.*': no memory for its \d+ bytes"):
        list(reader)


def gguf_with(path: Path, *metadata: bytes) -> Path:
    """Writes a file with one Q4_0 matrix [2, 32] that has the name of a model's first query projection."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(metadata)) + b"".join(metadata)
    head += string("blk.0.attn_q.weight") + struct.pack("<IQQIQ", 2, 32, 2, 2, 0)
    (path / "m.gguf").write_bytes(head + bytes(-len(head) % 32) + bytes(64))
    return path / "m.gguf"


@pytest.mark.parametrize(
    ("kind", "count", "values", "expected"),
    [
        (0, 70_000, bytes(70_000), SkippedArray(70_000)),
        (1, 3, bytes((1, 255, 3)), memoryview(bytes((1, 255, 3))).cast("b")),
        (8, 2, string("") + string("abc"), SkippedArray(2)),
        (9, 1, struct.pack("<IQ", 0, 0), SkippedArray(1)),
    ],
    ids=["many bytes", "few bytes", "strings", "arrays"],
)
def test_arrays_of_a_gguf_file_are_not_unpacked(tmp_path, kind, count, values, expected) -> None:
    array = string("a") + struct.pack("<IIQ", 9, kind, count) + values
    metadata, tensors = read_gguf(gguf_with(tmp_path, array, string("b") + struct.pack("<IB", 0, 7)))
    assert metadata == {"a": expected, "b": 7}
    assert type(metadata["a"]) is type(expected)
    assert list(tensors) == ["blk.0.attn_q.weight"]


@pytest.mark.parametrize("count", [1, 70_000])
def test_a_wrong_number_of_heads_is_not_taken_for_none(tmp_path, count) -> None:
    heads = string("llama.attention.head_count") + struct.pack("<IIQ", 9, 0, count) + bytes(count)
    file = gguf_with(tmp_path, string("general.architecture") + struct.pack("<I", 8) + string("llama"), heads)
    fails(file, r"attn_q\.weight.: llama\.attention\.head_count: expected a positive whole number", gguf_names="hf")


def test_names_of_all_layers_are_made_once(tmp_path, monkeypatch) -> None:
    """A conversion asks for each layer's name. Building all names each time took minutes for 40,000 experts."""
    writers.write_gpt_oss(tmp_path, np.random.default_rng(0), 96, 24, experts=5)
    reader = convert.open_reader(tmp_path)
    made, names = [], reader.names
    monkeypatch.setattr(reader, "names", lambda: made.append(1) or names())
    convert.write_checkpoint(reader, tmp_path / "out")
    assert made == [1]
