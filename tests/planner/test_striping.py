"""Computes the table of stripes in docs/inside/kernels.md by assigning units to stripes one at a time."""

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/inside/kernels.md"


def spans(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def test_the_worked_example_of_the_page_is_right() -> None:
    rows, columns, slices, stripes = 2, 3, 3, 4
    line = [((row, column), s) for column in range(columns) for row in range(rows) for s in range(slices)]
    lengths = [len(line) // stripes + (s < len(line) % stripes) for s in range(stripes)]
    expected = []
    for stripe in range(stripes):
        begin = sum(lengths[:stripe])
        units = range(begin, begin + lengths[stripe])
        tiles = list(dict.fromkeys(line[u][0] for u in units))
        parts = [f"{tile}: {spans([line[u][1] for u in units if line[u][0] == tile])}" for tile in tiles]
        expected.append(f"| {stripe} | {spans(list(units))} | {', '.join(parts)} |")
    table = PAGE.read_text().split("<!-- worked example")[1].split("\n\n")[1].splitlines()[2:]
    assert table == expected
