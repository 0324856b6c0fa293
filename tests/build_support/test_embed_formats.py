"""The table of weight formats that build_support/embed_formats.py writes for Python agrees with the C++ compiler's."""

from pathlib import Path

import pytest

from build_support.embed_formats import HEADER, TABLE, format_table, write_format_table
from tests.support import reference
from tests.support.kernels.launch import facts
from torch_marlin_metal.formats import GROUP_SIZES, WEIGHT_FORMATS

ROOT = Path(__file__).parents[2]
CODE_KINDS = ("integer", "e2m1", "table", "e4m3")
SCALE_CODINGS = ("floating", "e4m3", "e8m0")
ZEROS_ROLES = ("none", "zero_point", "bias")


def test_the_table_is_up_to_date() -> None:
    """To update the table: make build."""
    assert (ROOT / TABLE).read_text() == format_table((ROOT / HEADER).read_text())


def test_the_table_is_what_the_compiler_reads() -> None:
    compiled = facts()["traits"]
    assert tuple(compiled)[:-1] == tuple(WEIGHT_FORMATS)
    assert set(WEIGHT_FORMATS) == set(reference.ANY_FORMAT)
    for name, row in WEIGHT_FORMATS.items():
        kind, bits, offset, scales, zeros, group = compiled[name]
        assert (row.code_kind, row.code_bits, row.fixed_offset) == (CODE_KINDS[kind], bits, offset)
        assert (row.scale_coding, row.zeros_role) == (SCALE_CODINGS[scales], ZEROS_ROLES[zeros])
        assert (row.fixed_group_size or 0) == group
    assert GROUP_SIZES == reference.GROUP_SIZES


def test_the_build_writes_a_changed_table_only(tmp_path: Path) -> None:
    for name in (HEADER, TABLE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    before = (tmp_path / TABLE).stat().st_mtime_ns
    write_format_table(tmp_path)
    assert (tmp_path / TABLE).stat().st_mtime_ns == before
    header = (ROOT / HEADER).read_text()
    (tmp_path / HEADER).write_text(header.replace("X(lut4,", "X(table4,"))
    write_format_table(tmp_path)
    written = (tmp_path / TABLE).read_text()
    assert '("table4", "table", 4, 0, "floating", "none", 0, "lut[q] * s"),' in written and '"lut4"' not in written


@pytest.mark.parametrize(
    ("old", "new"),
    [("X(lut4,", "X(lut4, 16,"), ('"lut[q] * s",', ""), ("#define MARLIN_WEIGHT_FORMATS", "")],
)
def test_a_row_that_is_not_read_is_an_error(old: str, new: str) -> None:
    header = (ROOT / HEADER).read_text()
    assert header.count(old) == 1
    with pytest.raises(ValueError, match=r"^kernels/shared/types\.h: expected "):
        format_table(header.replace(old, new, 1))
