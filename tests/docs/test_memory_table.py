"""The tables of memory and of FLUX's products agree with the programs that write them."""

import runpy
from pathlib import Path

import pytest

from lab.predictions import many_rows

ROOT = Path(__file__).parents[2]


def test_a_row_of_the_table_is_what_the_program_computes() -> None:
    program = runpy.run_path(str(ROOT / "scripts/memory_table.py"))
    readme = (ROOT / "README.md").read_text()
    rows = readme.partition(program["BEGIN"])[2].partition(program["END"])[0].splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == list(program["MODELS"])
    _, config = next(iter(program["MODELS"].items()))
    for stated, computed in zip(rows[2].removesuffix(" |").split(" | ")[1:], program["row"](config), strict=True):
        (size, mac), (own_size, own_mac) = (cell.split(" GB, ") for cell in (stated, computed))
        assert float(size) == pytest.approx(float(own_size), rel=0.03)  # PyTorch's attention may need other memory
        assert mac == own_mac


def test_the_tables_of_diffusion_models_are_what_their_programs_compute() -> None:
    pytest.importorskip("diffusers")
    page = (ROOT / "docs/use/diffusion.md").read_text()
    sizes = runpy.run_path(str(ROOT / "scripts/diffusion_table.py"))
    assert sizes["BEGIN"] + sizes["table"]() + sizes["END"] in page
    found = page.partition(many_rows.BEGIN)[2].partition(many_rows.END)[0]
    for chip in ("M1", "M5 Max"):
        assert many_rows.row(chip) in found


def test_the_page_of_diffusion_models_keeps_its_sections() -> None:
    page = (ROOT / "docs/use/diffusion.md").read_text()
    heads = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert heads == ["FLUX on a Mac of 16 GB", "Which files stay packed", "With the rest of diffusers", "Speed"]
    assert page.count("<!-- end of") == 2
