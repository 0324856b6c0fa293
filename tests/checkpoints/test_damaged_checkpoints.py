"""Damaged copies of real checkpoints are read or refused, without any other exception and in bounded time."""

import json
import random
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.fixture_layers import DATA, WRITTEN, key, source_of
from torch_marlin_metal import convert

NATIVE = DATA / "native"  # no such folder: stands for the checkpoint that prepare() writes
ROUNDS = 40  # number of damaged copies of each checkpoint; --everything makes three times as many
SECONDS_FOR_ONE = 10  # CPU seconds, because other programs may use the processor
VALUES: tuple[Any, ...] = (None, True, -1, 0, 1, 3, 7, 10**30, 1e999, "", "x", "mlx", [], {}, [1], {"bits": -4})
BYTES = (0, 1, 0x22, 0x2C, 0x30, 0x39, 0x7D, 0x7F, 0x80, 0xFF)


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Changes, removes, repeats or truncates a few bytes, most often near the start, where headers are."""
    held = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        where = rng.randrange(len(held)) if rng.random() < 0.4 else rng.randrange(min(len(held), 700))
        length = rng.choice((1, 1, 2, 8, 64))
        match rng.randrange(6):
            case 0 | 1:
                held[where] = rng.choice(BYTES)
            case 2:
                held[where] ^= 1 << rng.randrange(8)
            case 3:
                del held[where : where + length]
            case 4:
                held[where:where] = held[where : where + length]
            case _:
                del held[where:]
        if not held:
            break
    return bytes(held)


def damage_json(content: bytes, rng: random.Random) -> bytes:
    """Replaces or removes a random value in a JSON text."""
    root = json.loads(content)
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            collect(value[key])

    collect(root.get("quantization_config", root.get("quantization", root)))
    owner, key = rng.choice(places)
    if rng.random() < 0.3:
        del owner[key]
    else:
        owner[key] = rng.choice(VALUES)
    return json.dumps(root).encode()


def damage_header(content: bytes, rng: random.Random) -> bytes:
    """Replaces one value in a safetensors header, and updates the stated length of the header."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    numbers = (0, 1, 2, 7, 8, 16, 64, 1 << 31, 1 << 63, -1)
    match rng.randrange(4):
        case 0:
            entry["dtype"] = rng.choice(("U8", "I8", "I16", "F16", "BF16", "I32", "U32", "F32", "I64", "F8_E4M3", "F4"))
        case 1 if entry["shape"]:
            entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(numbers)
        case 2:
            entry["shape"] = [size for size in entry["shape"] for size in ((size,), (1, size))[rng.randrange(2)]]
        case _:
            entry["data_offsets"][rng.randrange(2)] = rng.choice(numbers)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def prepare(folder: Path, copy: Path) -> Path:
    """Copies a checkpoint to the folder in which the test damages it."""
    if folder == NATIVE:
        convert.write_checkpoint(convert.open_reader(DATA / "gptq/gptqmodel-sym-g32-actorder-v1"), copy)
    else:
        shutil.copytree(folder, copy)
    return copy


def try_damaged(copy: Path, rng: random.Random) -> str:
    """Damages one file, reads the checkpoint, and repairs the file. Returns "read" or "refused"."""
    names = sorted(file.name for file in copy.iterdir() if file.name.startswith(("model", "config")))
    file, source = copy / rng.choice(names), source_of(copy)
    original = file.read_bytes()
    ways = [damage_bytes]
    ways += [damage_json] if file.suffix == ".json" else [damage_header] if file.suffix == ".safetensors" else []
    file.write_bytes(rng.choice(ways)(original, rng))
    outcome, started = "read", time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _weight in convert.read_layers(source, on_unsupported=rng.choice(("error", "dequantize", "skip"))):
                pass
        except convert.CheckpointError:
            outcome = "refused"
    assert time.process_time() - started < SECONDS_FOR_ONE
    file.write_bytes(original)
    return outcome


@pytest.mark.parametrize("folder", [*WRITTEN, NATIVE], ids=key)
def test_damaged_copies(folder: Path, tmp_path: Path, everything: bool) -> None:
    rng, rounds = random.Random(folder.name), 3 * ROUNDS if everything else ROUNDS
    copy = prepare(folder, tmp_path / "copy")
    outcomes = [try_damaged(copy, rng) for _ in range(rounds)]
    assert outcomes.count("refused") > rounds // 5
