"""lab/software/peers.py prints this package's rows of lab/notes/kernel-costs.md."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.whole
def test_the_table_of_peers_has_our_kernels_counts() -> None:
    """The command runs this package's kernels in checked mode; the other rows need other projects' wheels."""
    command = [sys.executable, "-m", "lab.software.peers", "--ours"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = done.stdout.splitlines()
    page = (ROOT / "lab" / "notes" / "kernel-costs.md").read_text().splitlines()
    assert len(rows) == 9
    assert [row for row in page if "| ours |" in row] == rows
