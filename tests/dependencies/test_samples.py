"""The sample of a run contains each value of each argument, and --everything runs the other cases."""

import itertools
import os
import re
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
def test_sizes(name, size, device): pass
@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.whole)])
def test_cases(case): pass
@pytest.fixture
def mps(): pass
@pytest.mark.parametrize(("x", "y"), [(x, y) for x in range(2) for y in range(2)])
def test_one_list(x, y, mps): pass
@pytest.mark.parametrize("x", range(2))
@pytest.mark.parametrize("y", range(3))
def test_on_the_cpu(x, y): pass
@pytest.mark.parametrize("x", range(2))
@pytest.mark.parametrize("y", range(3))
def test_always_on_mps(x, y, mps): pass
"""


def test_a_run_takes_a_sample_unless_everything_is_asked_for(tmp_path) -> None:
    """Runs a file with the project's plugin on a worker of pytest-xdist.

    If a test combines two lists of parameters, its sample has all cases on the CPU, and each value on mps. For a single
    list, the sample has all cases.
    """
    (tmp_path / "test_marks.py").write_text(PROGRAM)
    counts = []
    for options in ([], ["--everything"]):
        plugins = ["-p", "xdist", "-p", "tests.support.sampling", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-v", "-n", "1", *plugins, *options]
        alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **alone}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        names = re.findall(r"PASSED \S+::(test_\w+)(?:\[(\S+)\])?", done.stdout)
        counts.append(Counter(name for name, _ in names))
        for device in ("cpu", "mps"):
            values = [case.split("-") for name, case in names if name == "test_sizes" and case.endswith(device)]
            assert {value[0] for value in values} == set("abc") and {value[1] for value in values} == set("01234")
        said = "sample: 34 of 48 cases; `make test-all` (--everything) runs all" in done.stdout
        assert said == (not options), done.stdout
    assert counts == [
        {"test_sizes": 20, "test_cases": 1, "test_one_list": 4, "test_on_the_cpu": 6, "test_always_on_mps": 3},
        {"test_sizes": 30, "test_cases": 2, "test_one_list": 4, "test_on_the_cpu": 6, "test_always_on_mps": 6},
    ]
