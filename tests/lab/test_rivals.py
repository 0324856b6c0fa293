"""The predicted times of other projects' kernels, against products worked out by hand and against published times."""

import pytest

from lab.rivals import __main__ as command
from lab.rivals.rivals import Rival, find, seconds, table
from torch_marlin_metal.profiling import AppleSiliconGPU

M1, M3_MAX, M5_MAX = (AppleSiliconGPU.from_name(name) for name in ("M1", "M3 Max", "M5 Max"))


def test_one_row_takes_the_time_of_its_bytes() -> None:
    for rival, bits in ((Rival("llama.cpp", "q4_K"), 4.5), (Rival("MLX", "affine8", 64), 8.5)):
        moved = 4096 * 14336 * bits / 8
        assert seconds(rival, 1, 4096, 14336, M1) == pytest.approx(6e-6 + moved / 60.06e9, rel=0.06)


def test_the_published_times_of_mlx_on_an_m3_max() -> None:
    """17408 x 5120, affine 4 bit, groups of 64, one to 32 rows: the first and last of lab/published's list."""
    rival = Rival("MLX", "affine4", 64)
    assert seconds(rival, 1, 17408, 5120, M3_MAX) == pytest.approx(0.129e-3, rel=0.12)
    assert seconds(rival, 32, 17408, 5120, M3_MAX) == pytest.approx(0.513e-3, rel=0.12)


def test_rows_in_one_block_share_what_is_decoded() -> None:
    """Eight rows in llama.cpp's kernel for few rows take 14.7 clocks a weight; a ninth needs a larger block."""
    rival = Rival("llama.cpp", "q4_0")
    eight, nine = (seconds(rival, M, 4096, 14336, M3_MAX) for M in (8, 9))
    assert eight is not None and nine is not None
    assert seconds(rival, 2, 4096, 14336, M3_MAX) == pytest.approx(eight, rel=0.02) and nine > 1.2 * eight


def test_kernels_for_tensor_units_have_no_time() -> None:
    assert seconds(Rival("MLX", "nvfp4"), 64, 4096, 4096, M5_MAX) is None
    assert seconds(Rival("MLX", "nvfp4"), 12, 4096, 4096, M5_MAX) is not None


def test_every_format_has_its_kernels() -> None:
    rivals = {rival for form in command.FORMS for rival in form.rivals}
    for rival in rivals:
        names = {row.kernel for row in table() if (row.project, row.format) == (rival.project, rival.format)}
        assert {"vector", "matrix", "few" if rival.project == "llama.cpp" else "wide"} <= names, rival
    assert find(Rival("llama.cpp", "q8_0"), "few", 9) != find(Rival("llama.cpp", "q8_0"), "few", 8)


@pytest.mark.parametrize("chip", ["M1", "M1 Max", "M2 Ultra", "M4", "M5 Max"])
def test_one_row_takes_at_most_five_percent_longer_than_its_bytes(chip: str) -> None:
    ratios = [command.one_row(form, AppleSiliconGPU.from_name(chip)) for form in command.FORMS]
    counted = [ratio for ratio in ratios if ratio is not None]
    assert len(counted) >= len(ratios) - 1 and 1 <= min(counted) <= max(counted) <= 1.05


def test_cells_are_our_time_over_the_fastest_rivals() -> None:
    found = list(command.cells(("M1 Max",), [1, 8]))
    cells = {(cell.form, cell.experts, cell.N, cell.K, cell.rows): cell for cell in found}
    one = cells["Q4_K", False, 4096, 14336, 1]
    assert one.ratio == one.ours / one.theirs and 0.98 < one.ratio < 1.06
    assert one.rival_bytes == pytest.approx(4.625 / 4.5)
    assert cells["MXFP4", False, 4096, 14336, 8].ratio < 0.7
