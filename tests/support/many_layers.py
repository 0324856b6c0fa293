"""Writes checkpoints of many small layers."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_safetensors(path: Path, settings: dict[str, Any], tensors: list[tuple[str, str, list[int], bytes]]) -> Path:
    path.mkdir()
    entries, place = {}, 0
    for name, dtype, shape, content in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + len(content)]}
        place += len(content)
    header = json.dumps(entries).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.writelines(content for _, _, _, content in tensors)
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return path


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2", "desc_act": False}


def gptq_layer(name: str) -> list[tuple[str, str, list[int], bytes]]:
    return [
        (f"{name}.qweight", "I32", [2, 8], bytes(range(64))),
        (f"{name}.qzeros", "I32", [1, 1], bytes([0x88] * 4)),
        (f"{name}.scales", "F16", [1, 8], bytes([0, 0x3C] * 8)),
        (f"{name}.g_idx", "I32", [16], bytes(64)),
    ]


def entries(path: Path, count: int) -> Path:
    """Writes one layer and `count` tensors without bytes. No file of this size can have more entries in its header."""
    empty = [(f"model.layers.{i}.norm.weight", "F16", [0], b"") for i in range(count)]
    return write_safetensors(path, GPTQ, gptq_layer("a") + empty)


def layers(path: Path, count: int) -> Path:
    return write_safetensors(path, GPTQ, [part for i in range(count) for part in gptq_layer(f"model.layers.{i}.up")])


def stacked_experts(path: Path, count: int) -> Path:
    """Writes one gpt-oss stack of experts of 8 x 32 weights."""
    tensors = [
        ("a_blocks", "U8", [count, 8, 1, 16], bytes(128 * count)),
        ("a_scales", "U8", [count, 8, 1], bytes([120] * 8 * count)),
    ]
    return write_safetensors(path, {"quant_method": "mxfp4"}, tensors)


def gguf(path: Path, tensors: list[tuple[str, tuple[int, ...]]]) -> Path:
    """Writes Q4_0 tensors, given as tuples (name, sizes with K first)."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    directory, place = [], 0
    for name, sizes in tensors:
        rest = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 2, place)
        directory.append(text(name) + rest)
        blocks = 18
        for size in sizes[1:]:
            blocks *= size
        place += -(-blocks * (sizes[0] // 32) // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0) + b"".join(directory)
    file = path.with_suffix(".gguf")
    file.write_bytes(head + bytes(-len(head) % 32) + bytes(place))
    return file


def gguf_layers(path: Path, count: int) -> Path:
    """Writes a GGUF file of Q4_0 matrices of 8 x 32 weights."""
    return gguf(path, [(f"blk.{i}.attn_q.weight", (32, 8)) for i in range(count)])


def gguf_experts(path: Path, count: int) -> Path:
    """Writes a GGUF file with one stack of experts of 8 x 32 weights."""
    return gguf(path, [("blk.0.ffn_up_exps.weight", (32, 8, count))])


KINDS: dict[str, tuple[Callable[[Path, int], Path], bool]] = {
    "safetensors entries without bytes": (entries, False),
    "GPTQ layers": (layers, True),
    "gpt-oss, one stack of experts": (stacked_experts, True),
    "GGUF layers": (gguf_layers, True),
    "GGUF, one stack of experts": (gguf_experts, True),
}
