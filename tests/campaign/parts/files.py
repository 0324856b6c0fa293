"""Reads hostile checkpoints: damaged copies of real checkpoints, and files with a random header."""

import json
import random
import resource
import shutil
import struct
from functools import cache
from pathlib import Path
from typing import Any

from tests.checkpoints.test_damaged_checkpoints import NATIVE, WRITTEN, prepare, try_damaged
from torch_marlin_metal import convert

MEMORY = 6 << 30  # limit of the process's address space in bytes, which includes torch's libraries
SETTINGS: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"},
    {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
    {"quant_method": "mxfp4"},
    {"quant_method": "mlx", "bits": 4, "group_size": 32},
    {"quant_method": "torch_marlin_metal", "format_version": 1, "layers": {}},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
)
ROLES = (
    "qweight", "qzeros", "scales", "g_idx", "weight", "biases", "bias", "b_packed", "packed_format", "weight_packed",
    "weight_scale", "weight_shape", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4",
)  # fmt: skip
DTYPES = ("U8", "I8", "I16", "F16", "BF16", "I32", "U32", "F32", "I64", "F8_E4M3", "F4", "C64", "X", 3, None)
SIZES = (0, 1, 2, 3, 8, 16, 32, 64, 1 << 31, 1 << 62, 1 << 63, 10**30, -1, 1.5, True, "8")


@cache
def copies() -> list[Path]:
    """Returns copies of the real checkpoints, which each process makes only once."""
    import atexit
    import tempfile

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return [prepare(source, folder / str(i)) for i, source in enumerate([*WRITTEN, NATIVE])]


def hostile_header(rng: random.Random, path: Path) -> Path:
    """Writes a safetensors checkpoint whose header has plausible and impossible entries."""
    place, entries = 0, {}
    for _ in range(rng.randrange(1, 12)):
        name = (
            rng.choice(("a", "a.0", "b", "", "\x1b[31m", "a" * 5000)) + rng.choice((".", "_", "")) + rng.choice(ROLES)
        )
        shape: Any = [rng.choice(SIZES[:8] if rng.random() < 0.7 else SIZES) for _ in range(rng.randrange(5))]
        length = rng.choice((0, 4, 32, 64, 256, 1 << 40))
        offsets: Any = [place, place + length]
        if rng.random() < 0.1:
            offsets = rng.choice(([], [0], [1, 0], "x", None, [-8, 0], [1 << 63, 1 << 64]))
        entries[name] = {"dtype": rng.choice(DTYPES[:9] if rng.random() < 0.8 else DTYPES), "shape": shape}
        entries[name]["data_offsets"] = offsets
        place += length if length < 1 << 20 else 0
    text = json.dumps(entries).encode()
    stated = len(text) if rng.random() < 0.9 else rng.choice((0, 1, len(text) + 9, 1 << 40, (1 << 64) - 1))
    path.mkdir()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", stated) + text + rng.randbytes(place))
    (path / "config.json").write_text(json.dumps({"quantization_config": rng.choice(SETTINGS)}))
    return path


def hostile_gguf(rng: random.Random, path: Path) -> Path:
    """Writes a GGUF file with random metadata and tensors.

    Each entry has a valid form, but a few sizes are impossible.
    """

    def count(small: int) -> bytes:
        return struct.pack(
            "<Q", small if rng.random() < 0.95 else rng.choice((1 << 16, 1 << 32, 1 << 63, (1 << 64) - 1))
        )

    def text(value: bytes) -> bytes:
        return count(len(value)) + value

    def value(depth: int = 0) -> bytes:
        kind = rng.randrange(14)
        sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
        head = struct.pack("<I", kind)
        if kind == 8:
            return head + text(rng.choice((b"llama", b"gpt-oss", b"\xff", b"")))
        if kind == 9 and depth < 6:
            inner = value(depth + 1)
            return head + inner[:4] + count(rng.randrange(3)) + inner[4:] * rng.randrange(3)
        return head + rng.randbytes(sizes.get(kind, 4))

    keys = (b"general.architecture", b"general.alignment", b"llama.attention.head_count", b"split.count", b"x")
    metadata = [text(rng.choice(keys)) + value() for _ in range(rng.randrange(4))]
    names = ("blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight", "output.weight", "x")
    tensors, place = [], 0
    for _ in range(rng.randrange(4)):
        sizes = [
            rng.choice((32, 64, 256, 0, 1 << 40)) if i == 0 else rng.choice((1, 2, 8, 1 << 60))
            for i in range(rng.randrange(1, 5))
        ]
        offset = place if rng.random() < 0.9 else rng.choice((1, 1 << 40, 1 << 63))
        kind = rng.choice((0, 1, 2, 3, 8, 12, 39, 40, 99))
        name = text(rng.choice(names).encode())
        tensors.append(name + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset))
        place += 1024
    head = (
        b"GGUF" + struct.pack("<I", rng.choice((3, 3, 3, 2, 1, 1 << 31))) + count(len(tensors)) + count(len(metadata))
    )
    content = head + b"".join(metadata) + b"".join(tensors)
    file = path.with_suffix(".gguf")
    file.write_bytes(content + bytes(-len(content) % 32) + rng.randbytes(place))
    return file


def case(rng: random.Random, work: Path) -> str:
    """Reads a hostile checkpoint. The reader must return the layers or raise CheckpointError."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if rng.random() < 0.5:
        return try_damaged(rng.choice(copies()), rng)
    source = rng.choice((hostile_header, hostile_gguf))(rng, work / "source")
    options = {"on_unsupported": rng.choice(("error", "dequantize", "skip")), "gguf_names": rng.choice(("gguf", "hf"))}
    try:
        reader = convert.open_reader(source, **options)
        for _ in reader:
            pass
        for _ in reader.other_tensors():
            pass
    except convert.CheckpointError:
        return "refused"
    return "read"
