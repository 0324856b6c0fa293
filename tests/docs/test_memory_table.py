"""The tables of memory and of FLUX's products agree with the programs that write them."""

from pathlib import Path

import pytest

from lab.predictions import many_rows
from scripts import memory_table
from scripts.page_section import section

ROOT = Path(__file__).parents[2]


def test_a_row_of_the_table_is_what_the_program_computes() -> None:
    rows = section(memory_table.README, memory_table.NAME).splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == list(memory_table.MODELS)
    _, config = next(iter(memory_table.MODELS.items()))
    for stated, computed in zip(rows[2].removesuffix(" |").split(" | ")[1:], memory_table.row(config), strict=True):
        (size, mac), (own_size, own_mac) = (cell.split(" GB, ") for cell in (stated, computed))
        # PyTorch's attention may need other memory on other versions
        assert float(size) == pytest.approx(float(own_size), rel=0.03)
        assert mac == own_mac


def test_the_picture_shows_the_table() -> None:
    assert memory_table.PICTURE.read_text() == memory_table.picture(section(memory_table.README, memory_table.NAME))


def test_the_tables_of_diffusion_models_are_what_their_programs_compute() -> None:
    pytest.importorskip("diffusers")
    from scripts import diffusion_table

    assert section(many_rows.PAGE, "scripts.diffusion_table") == diffusion_table.table()
    found = section(many_rows.PAGE, "lab.predictions.many_rows")
    for chip in ("M1", "M5 Max"):
        assert many_rows.row(chip).strip() in found


def test_the_page_of_diffusion_models_keeps_its_sections() -> None:
    page = (ROOT / "docs/use/diffusion.md").read_text()
    heads = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert heads == ["FLUX on a Mac of 16 GB", "Which files stay packed", "With the rest of diffusers", "Speed"]
    assert page.count("<!-- end of") == 2


def test_a_section_is_written_between_its_marks_or_nowhere(tmp_path) -> None:
    page = tmp_path / "page.md"
    text = "before\n<!-- one -->\n\nold\n\n<!-- end of one -->\n<!-- two -->\n\nother\n"
    page.write_text(text)
    assert section(page, "one", "new\nlines\n") == section(page, "one") == "new\nlines"
    assert page.read_text() == text.replace("old", "new\nlines")
    for name in ("two", "on", "three"):  # the file of the second item is truncated
        with pytest.raises(ValueError, match=f"no section between <!-- {name} --> and <!-- end of {name} -->"):
            section(page, name, "text")
