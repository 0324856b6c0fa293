"""Tests that softmetal does not depend on the project, and that no wheel or source distribution contains softmetal."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def setup(tmp_path: Path, *command: str) -> Path:
    """Runs a command of setup.py without the extension. All outputs go under `tmp_path`. Returns the built archive."""
    build = ["build", "--build-base", str(tmp_path / "build")] if "bdist_wheel" in command else []
    done = subprocess.run(
        [
            *(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)),
            *(*build, *command, "--dist-dir", str(tmp_path / "dist")),
        ],
        cwd=ROOT,
        env={**os.environ, "WITHOUT_EXTENSION": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (product,) = (tmp_path / "dist").iterdir()
    return product


def test_wheel_holds_only_the_package(tmp_path: Path) -> None:
    with zipfile.ZipFile(setup(tmp_path, "bdist_wheel")) as wheel:
        names = wheel.namelist()
    assert "torch_marlin_metal/__init__.py" in names
    assert [n for n in names if not n.startswith(("torch_marlin_metal/", "torch_marlin_metal-"))] == []


def test_source_distribution_leaves_it_out(tmp_path: Path) -> None:
    with tarfile.open(setup(tmp_path, "sdist")) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert "torch_marlin_metal/__init__.py" in names
    assert [n for n in names if n.startswith("softmetal")] == []


def test_the_device_does_not_know_the_project() -> None:
    """softmetal can run the extension of any package. Only its tests may name torch_marlin_metal."""
    sources = [p for p in (ROOT / "softmetal").rglob("*") if p.suffix in (".py", ".h", ".cpp", ".mm")]
    assert len(sources) > 100
    tests = ROOT / "softmetal" / "tests"
    named = [p.relative_to(ROOT) for p in sources if "torch_marlin" in p.read_text() and tests not in p.parents]
    assert named == []
