"""lab/software/traffic.py reports the counts that follow from the shapes.

peers.py prints this package's rows of lab/notes/kernel-costs.md.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
M, N, K, GROUP = 9, 136, 192, 64


def run(*arguments: str) -> str:
    sizes = ["--rows", str(M), "--columns", str(N), "--k", str(K), "--group-size", str(GROUP), "--format", "uint4"]
    done = subprocess.run(
        [sys.executable, "-m", "lab.software.traffic", *sizes, *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_counts_follow_from_the_shapes() -> None:
    found = {row["variant"]: row for row in json.loads(run("--json", "--variants", "gemv", "double_buffered"))}
    gemv, staged = found["gemv"], found["double_buffered"]
    words, scales, rows = K * N // 2, K // GROUP * N * 2, M * K * 2
    for row in (gemv, staged):
        assert row["distinct"] | {"partials": 0} == {
            "activations": rows, "weights": words, "scales": scales, "zeros": scales // 2, "global_scale": 0, "lut": 0,
            "out": M * N * 2, "partials": 0,
        }  # fmt: skip
    row_blocks = M  # one block per row: with so few columns, larger blocks would leave more cores idle
    assert gemv["total"]["weights"] == row_blocks * words
    assert gemv["total"]["scales"] == row_blocks * scales
    # One row of 64 x 64 tiles reads each weight and each scale once, and the activations once per column of tiles.
    columns = -(-N // 64)
    assert staged["total"]["weights"] == words
    assert staged["total"]["scales"] == scales
    assert staged["total"]["activations"] == columns * rows
    assert staged["mma"] == columns * (64 // 8) ** 2 * (K // 8)
    assert staged["barriers"] == K // 32


@pytest.mark.whole
def test_the_table_of_peers_has_our_kernels_counts() -> None:
    """The command runs this package's kernels in checked mode, which takes 4 s.

    The other rows need other projects' wheels.
    """
    command = [sys.executable, "-m", "lab.software.peers", "--ours"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = done.stdout.splitlines()
    page = (ROOT / "lab" / "notes" / "kernel-costs.md").read_text().splitlines()
    assert len(rows) == 9
    assert [row for row in page if "| ours |" in row] == rows
