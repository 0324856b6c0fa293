"""Runs the unchanged programs of softmetal's README, and its example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=["any MSL", "another package's extension"])
def test_programs_of_the_readme_run(program: str) -> None:
    assert len(program.strip().splitlines()) <= 12
    run("-c", program)


def test_example_extension_runs() -> None:
    """Builds the example's operator, whose source does not mention softmetal, and runs it in checked mode."""
    assert run("examples/saxpy/run.py") == "saxpy: 1000 threads, 12000 bytes read, no fault\n"


def test_folders_of_the_readme_exist() -> None:
    table = README[README.index("| folder | contents |") :].split("\n\n")[0]
    names = [name for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) > 5
    assert [
        name for name in names if not any((folder / name).exists() for folder in (ROOT, ROOT / "src" / "softmetal"))
    ] == []
