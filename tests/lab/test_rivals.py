"""Compares predicted times of other projects' kernels with times computed by hand and with published times."""

import pytest

from lab.rivals import __main__ as command
from lab.rivals.rivals import Rival, Time, fastest, find, table
from torch_marlin_metal.profiling import AppleSiliconGPU

M1, M3_MAX, M5_MAX = (AppleSiliconGPU.from_name(name) for name in ("M1", "M3 Max", "M5 Max"))


def seconds(rival: Rival, rows: int, N: int, K: int, gpu: AppleSiliconGPU) -> float:
    """Returns the time of the fastest dense kernel."""
    return fastest(rival, rows, N, K, gpu).seconds


def test_one_row_takes_the_time_of_its_bytes() -> None:
    for rival, bits in ((Rival("llama.cpp", "q4_K"), 4.5), (Rival("MLX", "affine8", 64), 8.5)):
        moved = 4096 * 14336 * bits / 8
        assert seconds(rival, 1, 4096, 14336, M1) == pytest.approx(6e-6 + moved / 60.06e9, rel=0.06)


def test_the_published_times_of_mlx_on_an_m3_max() -> None:
    """One row and 32 rows, the first and last in lab/published's list: 17408 x 5120, affine 4 bit, groups of 64."""
    rival = Rival("MLX", "affine4", 64)
    assert seconds(rival, 1, 17408, 5120, M3_MAX) == pytest.approx(0.129e-3, rel=0.12)
    assert seconds(rival, 32, 17408, 5120, M3_MAX) == pytest.approx(0.513e-3, rel=0.12)


def test_rows_in_one_block_share_what_is_decoded() -> None:
    """In llama.cpp's kernel for few rows, up to eight rows share a block; a ninth row needs a larger block."""
    rival = Rival("llama.cpp", "q4_0")
    eight, nine = (seconds(rival, M, 4096, 14336, M3_MAX) for M in (8, 9))
    assert seconds(rival, 2, 4096, 14336, M3_MAX) == pytest.approx(eight, rel=0.02) and nine > 1.2 * eight


def test_kernels_for_tensor_units_take_at_least_their_bytes_or_their_products() -> None:
    """The weight is read at 614 GB/s times the efficiency of reads. 64 rows need 4.26 clocks for 512 multiply-adds."""
    rival, size = Rival("MLX", "nvfp4"), 4096 * 4096
    sixteen, many = (fastest(rival, rows, 4096, 4096, M5_MAX) for rows in (16, 64))
    moved = size * 4.5 / 8 + 16 * 8192 * 2
    assert sixteen == Time(pytest.approx(6e-6 + moved / M5_MAX.reachable_dram_bytes_per_second), "dram")
    assert many == Time(pytest.approx(6e-6 + 64 * size / 512 * 4.26 / (4 * 40 * M5_MAX.clock_hz), rel=1e-3), "tensor")
    assert fastest(rival, 12, 4096, 4096, M5_MAX).bound not in ("dram", "tensor")


def test_every_format_has_its_kernels() -> None:
    rivals = {rival for form in command.FORMS for rival in form.rivals}
    for rival in rivals:
        names = {row.kernel for row in table() if (row.project, row.format) == (rival.project, rival.format)}
        assert {"vector", "matrix", "few" if rival.project == "llama.cpp" else "wide"} <= names, rival
    assert find(Rival("llama.cpp", "q8_0"), "few", 9) != find(Rival("llama.cpp", "q8_0"), "few", 8)


@pytest.mark.parametrize("chip", ["M1", "M1 Max", "M2 Ultra", "M4", "M5 Max"])
def test_one_row_takes_at_most_five_percent_longer_than_its_bytes(chip: str) -> None:
    ratios = [command.one_row(form, AppleSiliconGPU.from_name(chip)) for form in command.FORMS]
    assert 1 <= min(ratios) <= max(ratios) <= 1.05


def form(name: str) -> command.Form:
    return next(form for form in command.FORMS if form.name == name)


def test_cells_are_our_time_over_the_fastest_rivals() -> None:
    one = command.cell(form("Q4_K"), 0, M1, 4096, 14336, 1)
    assert one.ratio == one.ours.seconds / one.theirs.seconds and 0.98 < one.ratio < 1.06
    assert one.byte_ratio == pytest.approx(4.625 / 4.5)
    assert one.reason == "both: bytes, ours 1.03 of theirs"
    eight = command.cell(form("MXFP4"), 0, M1, 4096, 14336, 8)
    assert eight.ratio < 0.7 and eight.reason == "ours: matrix clocks; theirs: issue slots"


def test_a_table_has_every_cell_above_the_limit_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FORMS", (form("Q4_K"), form("MXFP4")))
    found = list(command.cells(("M1", "M5 Max"), (1, 64)))
    assert len(found) == 2 * 2 * 2 * 2 * 3
    lines = list(command.above(found))[1:]
    cells = [line.split(" | ") for line in lines]
    assert sum(int(cell[1]) for cell in cells) == sum(cell.ratio > command.MOST for cell in found) > 0
    assert all(cell[-1].startswith(("both: ", "ours: ")) for cell in cells)
    assert "tensor units, at least" in cells[-1][-1] and float(cells[0][0].strip("| ")) < float(
        cells[-1][0].strip("| ")
    )
