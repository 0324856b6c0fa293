"""Recomputes the worked example of docs/inside/striping.md by assigning units to stripes one at a time."""

import re
from pathlib import Path

DOC = Path(__file__).resolve().parents[2] / "docs" / "inside" / "striping.md"


def spans(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def test_the_worked_example_of_the_page_is_right() -> None:
    text = DOC.read_text()
    sentences = " ".join(text.split())
    pattern = r"M = (\d+), N = (\d+), K = (\d+) with tiles of (\d+) x (\d+) and `k_per_slice` = (\d+)"
    sizes = re.search(pattern, sentences)
    assert sizes
    M, N, K, tile_m, tile_n, k_per_slice = map(int, sizes.groups())
    stripes = int(re.search(r"On (\d+) stripes", text)[1])
    rows, columns, slices = -(-M // tile_m), -(-N // tile_n), K // k_per_slice
    last = K - (slices - 1) * k_per_slice
    assert slices == 3
    assert (
        f"There are {rows} x {columns} tiles. Each tile has {slices} slices, of {k_per_slice}, {k_per_slice} and "
        in sentences
    )
    assert f"and {last} along K, so there are {rows * columns * slices} units." in sentences

    line = [((row, column), s) for column in range(columns) for row in range(rows) for s in range(slices)]
    lengths = [len(line) // stripes + (s < len(line) % stripes) for s in range(stripes)]
    expected, owners = [], {}
    for stripe in range(stripes):
        begin = sum(lengths[:stripe])
        units = range(begin, begin + lengths[stripe])
        tiles = list(dict.fromkeys(line[u][0] for u in units))
        parts = [f"{tile}: {spans([line[u][1] for u in units if line[u][0] == tile])}" for tile in tiles]
        expected.append(f"| {stripe} | {spans(list(units))} | {', '.join(parts)} |")
        for tile in tiles:
            owners.setdefault(tile, []).append((stripe, 2 * stripe + (tile != tiles[0])))
    table = text.split("<!-- worked example")[1].split("\n\n")[1].splitlines()[2:]
    assert table == expected

    whole = sorted(tile for tile, shares in owners.items() if len(shares) == 1)
    shared = [tile for tile, shares in owners.items() if len(shares) > 1]
    assert f"Tiles {whole[0]}, {whole[1]} and {whole[2]} each lie in one stripe" in sentences
    assert len(whole) == 3
    assert sentences.count(f"Tiles {shared[0]}, {shared[1]} and {shared[2]} are shared by two stripes") == 1
    assert {len(owners[tile]) for tile in shared} == {2}
    assert len(shared) == 3
    (a, b), (c, d), (e, f) = ([place for _, place in owners[tile]] for tile in shared)
    places = f"places {a} and {b} for tile {shared[0]}, {c} and {d} for {shared[1]}, and {e} and {f} for {shared[2]}"
    assert places in sentences
