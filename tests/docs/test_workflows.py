"""Workflows name each action by its commit. An action is other people's code: a tag can be moved, a commit cannot."""

import re
from pathlib import Path

WORKFLOWS = Path(__file__).parents[2] / ".github" / "workflows"


def test_actions_are_pinned_by_commit():
    uses = [line for file in WORKFLOWS.glob("*.yml") for line in file.read_text().splitlines() if "uses:" in line]
    assert len(uses) > 5
    wrong = [
        line for line in uses if not re.fullmatch(r"\s*(- )?uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)
    ]
    assert not wrong
