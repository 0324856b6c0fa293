"""The tables of docs/tile-sizing.md, computed by `torch_marlin_metal.profiling`; --write puts them into the page."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from torch_marlin_metal.profiling import ASSUMPTIONS, AppleSiliconGPU, TileTable, selection_guide, tile_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tile-sizing.md"
BLOCK = re.compile(r"(<!-- table: (?P<name>[\w -]+) -->\n)(?P<text>.*?)(<!-- end of table -->)", re.DOTALL)
GUIDES = (("M1", 4096, 4096), ("M1 Max", 4096, 14336), ("M4", 4096, 4096))


def markdown(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [headings, ["---"] * len(list(headings)), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def tiles(dtype: torch.dtype) -> str:
    table = tile_table("M1", dtype)
    shown = [cells for cells, row in zip(table.cells(), table.rows, strict=True) if not row.refused]
    return markdown(TileTable.HEADINGS, shown)


def refused() -> str:
    rows = []
    for dtype in (torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for row in tile_table("M1", dtype).rows:
            if row.refused:
                rows.append((row.variant, "x".join(map(str, row.tile)), name, str(row.threadgroup_bytes), row.refused))
    return markdown(("variant", "tile", "activations", "bytes", "reason"), rows)


def guide(gpu: str, N: int, K: int) -> str:
    rows = []
    for choice in selection_guide(gpu, N, K):
        span = str(choice.first) if choice.first == choice.last else f"{choice.first} to {choice.last}"
        tile = "x".join(map(str, choice.tile))
        rows.append((span, f"`{choice.variant}`", tile, f"{choice.seconds * 1e6:.0f}", choice.bound))
    return markdown(("M", "variant", "tile", "us at the largest M", "bound by"), rows)


def chips() -> str:
    rows = []
    for name in AppleSiliconGPU.names():
        gpu = AppleSiliconGPU.from_name(name)
        memory = f"{gpu.dram_bytes_per_second / 1e9:.0f}"
        reached = f"{gpu.reachable_dram_bytes_per_second / 1e9:.0f}"
        rows.append((name, f"Apple{gpu.family}", str(gpu.cores), f"{gpu.clock_hz / 1e9:g}", memory, reached,
                     f"{gpu.flop_per_second() / 1e12:.1f}", f"{gpu.matrix_flop_per_second / 1e12:.1f}",
                     f"{gpu.balance:.0f}"))  # fmt: skip
    headings = ("GPU", "family", "cores", "GHz", "GB/s peak", "GB/s reached", "fp32 TFLOP/s", "matrix TFLOP/s",
                "flop per byte")  # fmt: skip
    return markdown(headings, rows)


def tables() -> dict[str, str]:
    """Every table of the page by its name."""
    found = {"tiles float16": tiles(torch.float16), "tiles float32": tiles(torch.float32), "refused": refused()}
    found |= {f"choice {gpu} {N} {K}": guide(gpu, N, K) for gpu, N, K in GUIDES}
    return found | {"chips": chips(), "assumptions": "".join(f"- {text}\n" for text in ASSUMPTIONS)}


def filled(page: str) -> str:
    """The page with every table as it is computed now.

    Raises:
        KeyError: the page names a table that is not computed here, or leaves one out.
    """
    computed = tables()
    named = [match["name"] for match in BLOCK.finditer(page)]
    if sorted(named) != sorted(computed):
        raise KeyError(f"{PAGE.name} has the tables {named}, computed are {list(computed)}")
    return BLOCK.sub(lambda match: match[1] + computed[match["name"]] + match[4], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    page = filled(PAGE.read_text())
    if parser.parse_args().write:
        PAGE.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
