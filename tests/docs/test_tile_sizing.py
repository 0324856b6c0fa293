"""The tables of docs/tile-sizing.md are those that profiling computes."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "metal"))

import tile_tables  # noqa: E402


def test_tables_are_up_to_date():
    page = tile_tables.PAGE.read_text()
    assert tile_tables.filled(page) == page, "run: python benchmarks/metal/tile_tables.py --write"


def test_a_stale_table_is_noticed():
    page = tile_tables.PAGE.read_text()
    for match in tile_tables.BLOCK.finditer(page):
        stale = page[: match.start("text")] + match["text"].replace("1", "7", 1) + page[match.end("text") :]
        assert tile_tables.filled(stale) == page != stale, match["name"]
