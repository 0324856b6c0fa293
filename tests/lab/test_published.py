"""Compares the model with published measurements of real Macs (lab/published/)."""

import statistics

import pytest

from lab.published import published

ROWS = published.read()
FOUND, LEFT = published.compare(ROWS)
# Predicted divided by published time. A change of the model or of a chip's figures changes these ratios.
MEDIANS = {
    "llama.cpp, prompts": 0.954,
    "llama.cpp, tokens": 1.02,
    "memory rate": 1.0,
    "torch, dense products": 0.96,
    "MLX, scalar kernels": 0.979,
    "MLX, matrix kernels": 1.083,
    "llama.cpp, 1 to 8 rows": 1.025,
}


def test_the_medians_of_every_kind():
    kinds = {kind: published.summary_of(points) for kind, points in published.by_kind(FOUND).items()}
    assert {kind: round(row["median"], 3) for kind, row in kinds.items()} == MEDIANS
    assert all(row["points"] >= 6 for row in kinds.values())


def test_each_published_figure_is_compared_or_named_and_has_a_source():
    assert all(row["source"].startswith("https://") for row in ROWS)
    compared = [point.id for point in FOUND]
    assert sorted([*compared, *LEFT]) == sorted(row["id"] for row in ROWS)
    assert len(compared) > 0.6 * len(ROWS)


def test_the_median_is_given_without_each_chip_and_each_source():
    kinds = published.by_kind(FOUND)
    rows = kinds["MLX, scalar kernels"]
    medians = []
    for chip in {point.chip for point in rows}:
        medians.append(statistics.median(point.ratio for point in rows if point.chip != chip))
    assert published.summary_of(rows)["without_a_chip"] == [min(medians), max(medians)]
    assert published.summary_of(kinds["llama.cpp, tokens"])["without_a_source"] == []


def example(quantity: str, **changes: str) -> dict[str, str]:
    """Returns the first published row of a quantity, with changes."""
    return {**next(row for row in ROWS if row["quantity"] == quantity), **changes}


def test_a_figure_that_is_twice_as_fast_doubles_the_ratio():
    chosen = example("tg128")
    (point,), _ = published.compare([{**chosen, "value": str(2 * float(chosen["value"]))}])
    before = next(other for other in FOUND if other.id == chosen["id"])
    assert point.ratio == pytest.approx(2 * before.ratio)


@pytest.mark.parametrize(
    ("quantity", "changes", "message"),
    [
        ("tg128", {"value": "nan"}, "value: expected a positive number, got 'nan'"),
        ("pp512", {"M": "512.5"}, "M: expected a positive integer, got '512.5'"),
        ("time", {"K": ""}, "K: expected a positive integer, got ''"),
    ],
    ids=["nan", "rows", "size"],
)
def test_a_bad_cell_is_named(quantity, changes, message):
    with pytest.raises(ValueError, match=rf"row \d+: {message}"):
        published.compare([example(quantity, **changes)])


@pytest.mark.parametrize(
    ("quantity", "changes", "reason"),
    [
        ("tg128", {"chip": "M6 Max"}, "no chip 'M6 Max'"),
        ("tg128", {"software": "another engine"}, "kernels of another engine"),
        ("pp512", {"chip": "M5 Max", "gpu_cores": "40", "note": "Metal 4 tensor API"}, "kernels for tensor units"),
        ("time", {"chip": "M5 Max", "gpu_cores": "40", "M": "32"}, "kernels for tensor units"),
        ("pp tokens", {"M": "4", "format": "q8_0"}, "mul_mv_ext in q8_0"),
    ],
    ids=["chip", "software", "tensor API", "MLX on M5", "q8_0"],
)
def test_a_row_that_the_model_does_not_describe_is_left_out_with_a_reason(quantity, changes, reason):
    points, left = published.compare([example("tg128"), {**example(quantity, **changes), "id": "other"}])
    assert left == {"other": reason}
    assert len(points) == 1


def test_the_command_prints_every_point(capsys):
    published.main()
    printed = capsys.readouterr().out
    assert f"{len(LEFT)} rows are not modelled" in printed
    assert all(point.id in printed for point in FOUND) and all(kind in printed for kind in MEDIANS)
