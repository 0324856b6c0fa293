"""The samples that a run takes have each value, and --everything has the rest."""

import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.samples import covering

ROOT = Path(__file__).resolve().parents[2]


def test_a_sample_has_each_part_and_spreads_the_rest() -> None:
    cases = [{("format", f), ("size", s), ("mode", m)} for f, s, m in itertools.product(range(7), range(8), range(2))]
    sample = covering(cases)
    assert len(sample) == 8
    parts = Counter(part for i in sample for part in cases[i])
    assert set(parts) == set().union(*cases)
    assert parts["mode", 0] == parts["mode", 1] == 4


PROGRAM = """
import pytest
@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("size", range(5))
@pytest.mark.parametrize("name", "abc")
@pytest.mark.each_value_on_mps
def test_sizes(name, size, device): pass
@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.whole)])
def test_cases(case): pass
"""


def test_the_marks_leave_out_cases_unless_everything_is_asked_for(tmp_path) -> None:
    """Collects a file beside a copy of the project's conftest.py: 15 cases on the CPU, 5 of 15 on mps, 1 of 2 marked."""
    (tmp_path / "test_marks.py").write_text(PROGRAM)
    shutil.copy(ROOT / "conftest.py", tmp_path)
    counts = []
    for options in ([], ["--everything"]):
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *options, str(tmp_path)]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "-p no:cacheprovider"},
            capture_output=True, text=True,
        )  # fmt: skip
        names = [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]
        counts.append((len(names), sum("mps" in name for name in names)))
        values = {tuple(name.split("[")[1][:-1].split("-")) for name in names if "mps" in name}
        assert {value[0] for value in values} == set("abc") and {value[1] for value in values} == set("01234"), (
            done.stdout
        )
    assert counts == [(21, 5), (32, 15)]
