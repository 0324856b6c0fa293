"""Compares the planner's model with published measurements of real Macs (benchmarks/metal/published.py)."""

import csv
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks/metal"
POINTS = FOLDER / "published.csv"
sys.path.insert(0, str(FOLDER))

import published  # noqa: E402


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    picture = tmp_path_factory.mktemp("published") / "points.png"
    command = [sys.executable, str(FOLDER / "published.py"), str(POINTS), "--json", "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    return json.loads(done.stdout)


def run(path: Path, monkeypatch) -> int:
    """Runs the script's main function in this process, which is faster than a process of its own."""
    monkeypatch.setattr(sys, "argv", ["published.py", str(path), "--json"])
    return published.main()


def test_medians_of_every_kind_are_within_a_tenth(found):
    assert set(found["kinds"]) == {
        "llama.cpp, prompts",
        "llama.cpp, tokens",
        "llama.cpp, 1 to 8 rows",
        "MLX, scalar kernels",
        "MLX, matrix kernels",
        "torch, dense products",
        "memory rate",
    }
    for kind, row in found["kinds"].items():
        assert row["points"] >= 6, kind
        assert 0.9 <= row["median"] <= 1.1, (kind, row)


def test_each_published_figure_is_compared_or_named_and_has_a_source(found):
    rows = list(csv.DictReader(POINTS.open(newline="")))
    assert all(row["source"].startswith("https://") for row in rows)
    compared = [point["id"] for point in found["points"]]
    assert sorted([*compared, *found["not_modelled"]]) == sorted(row["id"] for row in rows)
    assert len(compared) > 0.6 * len(rows)


def test_the_median_is_given_without_each_chip_and_each_source(found):
    kinds = found["kinds"]
    rows = [point for point in found["points"] if point["kind"] == "MLX, scalar kernels"]
    medians = []
    for chip in {point["chip"] for point in rows}:
        medians.append(statistics.median(point["ratio"] for point in rows if point["chip"] != chip))
    assert kinds["MLX, scalar kernels"]["without_a_chip"] == [min(medians), max(medians)]
    assert kinds["llama.cpp, tokens"]["without_a_source"] == []
    assert len(kinds["MLX, matrix kernels"]["without_a_source"]) == 2


def example(quantity: str, **changes: str) -> dict[str, str]:
    """Returns the first published row of a quantity, with changes."""
    rows = csv.DictReader(POINTS.open(newline=""))
    return {**next(row for row in rows if row["quantity"] == quantity), **changes}


def table(folder: Path, *rows: dict[str, str]) -> Path:
    """Writes a table of these rows and returns its path."""
    path = folder / "some.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_figure_that_is_twice_as_fast_doubles_the_ratio(tmp_path, found):
    chosen = example("tg128")
    (point,), _ = published.compare([{**chosen, "value": str(2 * float(chosen["value"]))}])
    before = next(other for other in found["points"] if other["id"] == chosen["id"])
    assert point.ratio == pytest.approx(2 * before["ratio"])


@pytest.mark.parametrize(
    ("quantity", "changes", "message"),
    [
        ("tg128", {"value": ""}, "value: expected a positive number, got ''"),
        ("tg128", {"value": "nan"}, "value: expected a positive number, got 'nan'"),
        ("pp512", {"M": "512.5"}, "M: expected a positive integer, got '512.5'"),
        ("pp512", {"gpu_cores": "many"}, "gpu_cores: expected a positive integer, got 'many'"),
        ("time", {"K": ""}, "K: expected a positive integer, got ''"),
    ],
    ids=["no value", "nan", "rows", "cores", "size"],
)
def test_a_bad_cell_is_named(tmp_path, monkeypatch, capsys, quantity, changes, message):
    assert run(table(tmp_path, example(quantity, **changes)), monkeypatch) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"published\.py: .*some\.csv: row \d+: " + re.escape(message) + "\n", error)


def test_a_missing_column_and_a_missing_file_are_named(tmp_path, monkeypatch, capsys):
    row = example("tg128")
    del row["gpu_cores"]
    assert run(table(tmp_path, row), monkeypatch) == 2
    assert "a table without gpu_cores" in capsys.readouterr().err
    assert run(tmp_path / "none.csv", monkeypatch) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("quantity", "changes", "reason"),
    [
        ("tg128", {"chip": "M6 Max"}, "no chip 'M6 Max'"),
        ("tg128", {"chip": "M1 Max", "gpu_cores": "40"}, "M1 Max with 40 cores"),
        ("tg128", {"software": "another engine"}, "kernels of another engine"),
        ("latency", {}, "latency"),
        ("pp512", {"chip": "M5 Max", "gpu_cores": "40", "note": "Metal 4 tensor API"}, "kernels for tensor units"),
        ("time", {"chip": "M5 Max", "gpu_cores": "40", "M": "32"}, "kernels for tensor units"),
        ("pp tokens", {"M": "4", "format": "q8_0"}, "mul_mv_ext in q8_0"),
    ],
    ids=["chip", "cores", "software", "quantity", "tensor API", "MLX on M5", "q8_0"],
)
def test_a_row_that_the_model_does_not_describe_is_left_out_with_a_reason(quantity, changes, reason):
    known = {"latency": "tg128"}.get(quantity, quantity)
    other = {**example(known, **changes), "id": "other", "quantity": quantity}
    points, left = published.compare([example("tg128"), other])
    assert left == {"other": reason}
    assert len(points) == 1


@pytest.mark.parametrize(
    ("quantity", "changes", "kind"),
    [
        ("pp tokens", {"M": "64"}, "llama.cpp, prompts"),
        ("time", {"chip": "M5 Max", "gpu_cores": "32", "M": "3", "N": "4096", "K": "14336"}, "MLX, scalar kernels"),
        ("time", {"chip": "M2 Ultra", "gpu_cores": "60", "act": "fp16", "M": "64"}, "MLX, matrix kernels"),
        ("tg128", {"chip": "A18 Pro", "gpu_cores": "5"}, "llama.cpp, tokens"),
        ("bandwidth", {"what": "stream", "chip": "M5", "gpu_cores": "8"}, "memory rate"),
    ],
    ids=str,
)
def test_other_chips_shapes_and_rows_are_predicted(quantity, changes, kind):
    (point,), _ = published.compare([example(quantity, **changes)])
    assert (point.kind, point.chip) == (kind, changes.get("chip", point.chip))
    assert 0 < point.predicted < float("inf")


def test_a_file_without_known_rows_fails(tmp_path, monkeypatch, capsys):
    path = tmp_path / "none.csv"
    path.write_text(POINTS.read_text().splitlines()[0] + "\n")
    assert run(path, monkeypatch) == 1
    assert "no row that the model describes" in capsys.readouterr().err
