"""Compares the clocks of other projects' kernels with ours."""

import pytest

from lab.rivals import count
from lab.rivals.__main__ import FORMS
from lab.rivals.rivals import Rival


def test_clocks_by_hand() -> None:
    """gemv with one row needs 118 slots for 64 weights of a lane, and 110 at the end of each group of 64."""
    four_bits = next(form for form in FORMS if form.name == "uint4b8 g64")
    assert count.ours(four_bits, 1) == pytest.approx(118 / 64 + 110 / (64 * 128 / 32))
    mlx = Rival("MLX", "affine4", 64)
    assert count.theirs(mlx, 1) == 4.2
    assert count.theirs(mlx, 8) == 2 * 11.2  # two blocks of four rows
    assert count.theirs(Rival("llama.cpp", "q5_K"), 1) is None  # the tool cannot compile this kernel


def test_our_kernels_need_fewer_clocks_than_every_rivals() -> None:
    for form in FORMS:
        for rows in count.ROWS:
            clocks = [count.theirs(rival, rows) for rival in form.rivals]
            assert all(them is None or count.ours(form, rows) < them for them in clocks), (form.name, rows)


def test_every_kernel_of_the_source_has_a_stored_row() -> None:
    stored = [(row.kernel, row.format, row.rows) for row in count.table() if row.project == count.PROJECT]
    assert stored == [(source.kernel, source.format, source.rows) for source in count.sources()]
    assert len(count.clocks_table().splitlines()) == 2 + len(FORMS) + sum(len(form.rivals) for form in FORMS)
