"""Tests that the workflows fit GitHub's schema and pin other people's code: actions by commit, packages by hash."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


def test_actions_are_pinned_by_commit():
    uses = [line for file in WORKFLOWS.glob("*.yml") for line in file.read_text().splitlines() if "uses:" in line]
    assert len(uses) > 5
    wrong = [
        line for line in uses if not re.fullmatch(r"\s*(- )?uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)
    ]
    assert not wrong


def schema_errors(*workflows: Path) -> str:
    """Returns the errors that GitHub's schema finds in workflow files, or an empty string. Needs no network."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout if done.returncode else ""


def test_workflows_fit_the_schema() -> None:
    workflows = sorted(WORKFLOWS.glob("*.yml"))
    assert len(workflows) >= 2
    assert schema_errors(*workflows) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("runs-on: ", "run-on: "),
        ("permissions:", "permission:"),
        ("contents: read", "contents: reads"),
        ("steps:", "step:"),
    ],
)
def test_a_mistake_in_a_workflow_is_reported(tmp_path: Path, right: str, wrong: str) -> None:
    text = (WORKFLOWS / "ci.yml").read_text()
    assert right in text
    (tmp_path / "ci.yml").write_text(text.replace(right, wrong, 1))
    assert "ci.yml" in schema_errors(tmp_path / "ci.yml")


def test_ci_installs_packages_by_hash():
    """Each line must have a hash. Each package that pyproject.toml asks for must be there, in a version it allows."""
    head, *lines = (ROOT / ".ci" / "requirements.txt").read_text().splitlines()
    assert "scripts/hash_requirements.py" in head
    found = [re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found)
    versions = {match[1]: match[2] for match in found if match}
    assert "--require-hashes" in (ROOT / ".ci" / "run").read_text()
    extras = re.search(
        r"\[project.optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    asked = re.findall(r'"([\w-]+)(?:\[\w+\])?(==[\w.]+|>=[\w.]+)?"', extras[1])
    assert len(asked) > 20
    for name, version in asked:
        name = re.sub(r"[-_.]+", "-", name).lower()
        # hqq has no wheel, and building one needs other packages. auto-round brings many packages, and its test is
        # skipped without it.
        if name in ("torch-marlin-metal", "hqq", "auto-round"):
            continue
        assert name in versions, f"{name}: run scripts/hash_requirements.py"
        if version.startswith("=="):
            assert versions[name] == version[2:], name
