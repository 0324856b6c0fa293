"""Compares the planner's model with published measurements of real Macs (benchmarks/metal/published.py)."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/metal/published.py"
POINTS = ROOT / "benchmarks/metal/published.csv"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    picture = tmp_path_factory.mktemp("published") / "points.png"
    done = run(POINTS, "--json", "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    return json.loads(done.stdout)


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


def test_a_figure_that_is_twice_as_fast_doubles_the_ratio(tmp_path, found):
    rows = list(csv.DictReader(POINTS.open(newline="")))
    chosen = next(row for row in rows if row["quantity"] == "tg128")
    path = tmp_path / "one.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerow({**chosen, "value": str(2 * float(chosen["value"]))})
    (point,) = json.loads(run(path, "--json").stdout)["points"]
    before = next(other for other in found["points"] if other["id"] == chosen["id"])
    assert point["ratio"] == pytest.approx(2 * before["ratio"])


def test_a_file_without_known_rows_fails(tmp_path):
    path = tmp_path / "none.csv"
    path.write_text(POINTS.read_text().splitlines()[0] + "\n")
    done = run(path)
    assert done.returncode == 1
    assert "no row that the model describes" in done.stderr
