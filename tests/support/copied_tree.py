"""Copies of the repository that a test edits as a developer would."""

import filecmp
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def edit(root: Path, file: str, pattern: str, replacement: str) -> None:
    """Replaces the one match of a pattern in a file."""
    text, count = re.subn(pattern, replacement, (root / file).read_text(), flags=re.MULTILINE)
    assert count == 1, f"{file}: {pattern} occurs {count} times"
    (root / file).write_text(text)


def copied_files() -> list[str]:
    folders = ("build_support", "csrc", "kernels", "torch_marlin_metal", "tests", "docs")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders, "setup.py", "pyproject.toml", "conftest.py",
         "README.md", "LICENSE"], cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    return [name for name in listed if (ROOT / name).exists()]


def copy_tree(target: Path) -> Path:
    for name in copied_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    return target


def touched_files(copy: Path) -> list[str]:
    """Returns the product's files, tests and pages that differ from the repository's, or that only the copy has."""
    found = {
        path.relative_to(copy).as_posix()
        for folder in ("csrc", "kernels", "torch_marlin_metal", "tests", "docs")
        for path in (copy / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return sorted(
        name for name in found if not (ROOT / name).exists() or not filecmp.cmp(ROOT / name, copy / name, shallow=False)
    )


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the copy, without the environment variables of this test run."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    return subprocess.run([*command], cwd=copy, env=environment, check=False, capture_output=True, text=True)
