"""For damaged safetensors and GGUF files and for wrong indexes, one error names the file and the tensor."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoint_writers as writers
from tests.support.checkpoint_damage import GPTQ, configure, fails
from tests.support.checkpoint_writers import LAYER
from torch_marlin_metal import convert
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.files.safetensors import keep_file_open, read_header, read_tensor

K, N = 64, 16


@pytest.fixture
def gptq(tmp_path) -> Path:
    writers.write_gptq(tmp_path, np.random.default_rng(1), K, N, 32, version=2)
    return tmp_path


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: str = "I32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS: dict[str, tuple[bytes | dict[str, Any], bytes, str]] = {
    "not JSON": (b"{", b"", "not valid JSON"),
    "not UTF-8": (b"\xff\xfe", b"", "not valid JSON"),
    "nested beyond the stack": (b"[" * 200_000, b"", "not valid JSON"),
    "an integer of too many digits": (b'{"a": ' + b"9" * 10_000 + b"}", b"", "not valid JSON"),
    "a list": (b"[]", b"", "expected a JSON object as header"),
    "a tensor twice": (b'{"a": {}, "a": {}}', b"", "the key 'a' occurs twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "expected __metadata__ to map strings to strings"),
    "an entry that is a number": ({"a": 3}, b"", "tensor 'a': expected an object"),
    "an unknown dtype": ({"a": entry("I33")}, bytes(8), r"tensor 'a': expected dtype to be one of .*, got 'I33'"),
    "a negative size": ({"a": entry(shape=(-2,))}, bytes(8), "tensor 'a': expected shape"),
    "a fractional size": ({"a": entry(shape=(2.0,))}, bytes(8), "tensor 'a': expected shape"),
    "a size of true": ({"a": entry(shape=(True,), offsets=(0, 4))}, bytes(4), "tensor 'a': expected shape"),
    "shape beyond the data": ({"a": entry(shape=(3,))}, bytes(8), r"tensor 'a': shape \[3\] of I32 needs 96 bits"),
    "a huge shape": ({"a": entry(shape=(2**62, 2**62))}, bytes(8), "tensor 'a': shape"),
    "data beyond the file": ({"a": entry(shape=(4,), offsets=(0, 16))}, bytes(8), "tensor 'a': its data ends at byte"),
    "falling offsets": ({"a": entry(offsets=(8, 0))}, bytes(8), "tensor 'a': expected data_offsets"),
    "one offset": ({"a": entry(offsets=(8,))}, bytes(8), "tensor 'a': expected data_offsets"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "tensor 'b': overlaps its neighbour"),
    "a hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "tensor 'b': leaves a hole"),
    "bytes after the last tensor": ({"a": entry()}, bytes(9), "the tensors end at byte"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_safetensors_header(tmp_path, case) -> None:
    header, data, message = HEADERS[case]
    configure(tmp_path, GPTQ)
    write_raw(tmp_path, header, data)
    fails(tmp_path, rf"model\.safetensors: {message}")


def test_truncated_safetensors_at_every_length(gptq) -> None:
    whole = (gptq / "model.safetensors").read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        (gptq / "model.safetensors").write_bytes(whole[:length])
        fails(gptq, r"model\.safetensors: ")


def test_a_file_that_shrinks_after_its_header_was_read(gptq) -> None:
    reader = convert.open_reader(gptq)
    os.truncate(gptq / "model.safetensors", (gptq / "model.safetensors").stat().st_size - 1)
    with pytest.raises(convert.CheckpointError, match=r"the file ends after \d+ of its \d+ bytes"):
        list(reader)


def write_index(path: Path, weight_map: Any) -> None:
    os.rename(path / "model.safetensors", path / "a.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def all_in(path: Path, shard: str) -> dict[str, str]:
    return dict.fromkeys(load_file(path / "model.safetensors"), shard)


INDEXES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no map": (lambda path: None, "weight_map: expected an object"),
    "empty map": (lambda path: {}, "weight_map: expected an object"),
    "missing shard": (lambda path: all_in(path, "b.safetensors"), r"its shard b\.safetensors is missing"),
    "parent": (lambda path: all_in(path, "../a.safetensors"), r"expected the plain name .*, got '\.\./a\.safetensors'"),
    "absolute": (lambda path: all_in(path, "/etc/a.safetensors"), "expected the plain name"),
    "windows parent": (lambda path: all_in(path, "..\\a.safetensors"), "expected the plain name"),
    "no text": (lambda path: {"a": 3}, "tensor 'a': expected the plain name .*, got 3"),
    "NUL": (lambda path: all_in(path, "a\0.safetensors"), "expected the plain name"),
    "a pickle": (lambda path: all_in(path, "a.bin"), "expected the plain name of a .safetensors file"),
    "a tensor that is not there": (
        lambda path: all_in(path, "a.safetensors") | {"b.qweight": "a.safetensors"},
        r"a\.safetensors: tensor 'b\.qweight' is missing",
    ),
}


@pytest.mark.parametrize("case", INDEXES)
def test_index(gptq, case) -> None:
    make, message = INDEXES[case]
    write_index(gptq, make(gptq))
    fails(gptq, message)


def test_a_tensor_in_two_shards(gptq) -> None:
    tensors = load_file(gptq / "model.safetensors")
    write_index(gptq, dict.fromkeys(tensors, "a.safetensors") | {"x": "b.safetensors"})
    save_file({"x": torch.ones(1), f"{LAYER}.scales": torch.ones(1)}, gptq / "b.safetensors")
    fails(gptq, rf"b\.safetensors: tensor '{LAYER}\.scales' is also in .*a\.safetensors")


def test_a_link_that_leads_out(gptq, tmp_path_factory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret.safetensors"
    os.rename(gptq / "model.safetensors", outside)
    (gptq / "model.safetensors").symlink_to(outside)
    fails(gptq, r"model\.safetensors: a symbolic link that leads out of the checkpoint")


def test_a_loop_of_links_and_a_pipe(gptq) -> None:
    file = gptq / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    fails(gptq, r"model\.safetensors: expected a regular file")


def test_several_files_and_no_index(gptq) -> None:
    for name in "ab":
        (gptq / f"{name}.safetensors").write_bytes((gptq / "model.safetensors").read_bytes())
    (gptq / "model.safetensors").unlink()
    fails(gptq, r"an index file is needed to choose among a\.safetensors, b\.safetensors")


def test_paths_that_are_no_checkpoint(tmp_path) -> None:
    fails(tmp_path / "absent", "absent: does not exist")
    (tmp_path / "m.txt").write_text("")
    fails(tmp_path / "m.txt", r"m\.txt: expected a directory, a \.gguf or a \.safetensors file")
    configure(tmp_path, GPTQ)
    fails(tmp_path, "no safetensors file")
    (tmp_path / "m.gguf").write_bytes(b"")
    fails(tmp_path, r"for GGUF give the path of the \.gguf file itself")


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor_info(name: str = "w.weight", dims: tuple[int, ...] = (32, 2), kind: int = 2, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(infos: list[bytes], data: int = 64, metadata: bytes = b"", keys: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), keys) + metadata + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


GGUFS: dict[str, tuple[bytes, str, type]] = {
    "empty": (b"", "not a GGUF file", convert.CheckpointError),
    "magic": (b"GGML" + bytes(60), "not a GGUF file", convert.CheckpointError),
    "version": (gguf([tensor_info()], version=1), "GGUF version 1 is not read", convert.UnsupportedFormat),
    "big-endian": (gguf([], version=0x03000000), "GGUF version 50331648", convert.UnsupportedFormat),
    "no tensors": (gguf([]), "no tensor of a quantized type", convert.CheckpointError),
    "data beyond the file": (
        gguf([tensor_info()], data=35),
        "tensor 'w.weight': bytes .* beyond",
        convert.CheckpointError,
    ),
    "huge": (gguf([tensor_info(dims=(2**62, 2**62))]), "tensor 'w.weight': bytes", convert.CheckpointError),
    "partial block": (
        gguf([tensor_info(dims=(40, 2))]),
        "does not consist of Q4_0 blocks of 32",
        convert.CheckpointError,
    ),
    "no elements": (gguf([tensor_info(dims=(32, 0))]), "does not consist of Q4_0 blocks", convert.CheckpointError),
    "rank": (gguf([tensor_info(dims=(32,) * 6)]), "expected 1 to 5 dimensions, got 6", convert.CheckpointError),
    "type": (gguf([tensor_info(kind=77)]), "unknown type number 77", convert.UnsupportedFormat),
    "twice": (gguf([tensor_info(), tensor_info(offset=64)], 128), "'w.weight' occurs twice", convert.CheckpointError),
    "overlap": (
        gguf([tensor_info(), tensor_info("v", offset=32)], 128),
        "tensor 'v' overlaps 'w.weight'",
        convert.CheckpointError,
    ),
    "misaligned": (gguf([tensor_info(offset=8)], 128), "are not aligned", convert.CheckpointError),
    "key twice": (
        gguf([], metadata=2 * (string("a") + struct.pack("<IB", 0, 1)), keys=2),
        "metadata key 'a' occurs twice",
        convert.CheckpointError,
    ),
    "metadata type": (
        gguf([], metadata=string("a") + struct.pack("<I", 99), keys=1),
        "unknown metadata type 99",
        convert.CheckpointError,
    ),
    "alignment": (
        gguf([], metadata=string("general.alignment") + struct.pack("<II", 4, 24), keys=1),
        "general.alignment: expected a power of two, got 24",
        convert.CheckpointError,
    ),
    "more keys than bytes": (
        gguf([], keys=2**60),
        "truncated|unknown metadata type|occurs twice",
        convert.CheckpointError,
    ),
    "an array beyond the file": (
        gguf([], metadata=string("a") + struct.pack("<IIQ", 9, 8, 2**60), keys=1),
        "truncated",
        convert.CheckpointError,
    ),
    "arrays in arrays": (
        gguf([], metadata=string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, keys=1),
        "unknown metadata type 9",
        convert.CheckpointError,
    ),
    "a key beyond the file": (
        gguf([], metadata=struct.pack("<Q", 2**63), keys=1),
        "truncated",
        convert.CheckpointError,
    ),
}


@pytest.mark.parametrize("case", GGUFS)
def test_gguf(tmp_path, case) -> None:
    content, message, kind = GGUFS[case]
    (tmp_path / "m.gguf").write_bytes(content)
    fails(tmp_path / "m.gguf", rf"m\.gguf: .*({message})", kind)


def test_memory_is_used_again_only_when_its_tensor_is_gone(tmp_path) -> None:
    made = {name: torch.randint(0, 255, (3 << 20,), dtype=torch.uint8) for name in "abc"}
    save_file(made, tmp_path / "model.safetensors")
    infos, _ = read_header(tmp_path / "model.safetensors")
    a = read_tensor(infos["a"]).view(torch.int32)
    b = read_tensor(infos["b"])
    part, place = a[5:7], a.data_ptr()
    del a
    c = read_tensor(infos["c"])  # `part` is a view of a's memory
    assert torch.equal(part, made["a"].view(torch.int32)[5:7])
    del part
    again = read_tensor(infos["a"])
    assert again.data_ptr() == place
    for tensor, name in ((again, "a"), (b, "b"), (c, "c")):
        assert torch.equal(tensor, made[name])


def test_a_thread_keeps_only_the_file_open_that_it_read_last(tmp_path, monkeypatch) -> None:
    infos = {}
    for file in "ab":
        made = {f"{file}{number}": torch.full((2,), number, dtype=torch.int32) for number in range(2)}
        save_file(made, tmp_path / f"{file}.safetensors")
        infos |= read_header(tmp_path / f"{file}.safetensors")[0]
    opened: list[Any] = []
    original = Path.open
    monkeypatch.setattr(Path, "open", lambda *args, **kw: opened.append(original(*args, **kw)) or opened[-1])
    with keep_file_open():
        with keep_file_open():  # a caller may also keep files open
            values = [read_tensor(infos[name]).tolist() for name in ("a0", "a1", "b0", "b1", "a1")]
        assert values == [[0, 0], [1, 1], [0, 0], [1, 1], [1, 1]]
        assert [stream.closed for stream in opened] == [True, True, False]
    assert [stream.closed for stream in opened] == [True] * 3
    read_tensor(infos["a0"])
    assert [stream.closed for stream in opened] == [True] * 4


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a214614ab2935" * 4 + b"\nsize 4000000000\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "pytorch_model.bin", "model.gguf"])
def test_a_pointer_of_git_lfs_is_named(gptq, name) -> None:
    if name.endswith((".bin", ".gguf")):
        (gptq / "model.safetensors").unlink()
    (gptq / name).write_bytes(POINTER)
    path = gptq / name if name.endswith(".gguf") else gptq
    with pytest.raises(
        CheckpointError, match=rf"{name}: a pointer of Git LFS, not the file itself: run `git lfs pull`"
    ):
        convert.open_reader(path, allow_pickle=True)
