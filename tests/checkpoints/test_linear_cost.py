"""The work to open and convert grows linearly with the number of layers. The tests count function calls, not time."""

import sys
from pathlib import Path

import pytest

from tests.support.many_layers import KINDS
from torch_marlin_metal import convert


def calls(path: Path, kind: str, count: int) -> int:
    """Counts the function calls that open a checkpoint and, if its kind can be converted, convert it."""
    make, converts = KINDS[kind]
    source = make(path / f"source{count}", count)
    found = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        reader = convert.open_reader(source)
        items = len(reader) + sum(1 for _ in reader.others())
        if converts:
            convert.write_checkpoint(reader, path / f"out{count}", max_shard_bytes=20_000)
    finally:
        sys.setprofile(before)
    assert items in (count, count + 1)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_calls_grow_with_the_number_of_layers(tmp_path, kind) -> None:
    few, many = (calls(tmp_path, kind, count) for count in (60, 480))
    assert 60 < few < many < 8.5 * few
