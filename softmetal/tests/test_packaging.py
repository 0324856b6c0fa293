"""Tests the project on its own: installs a copy of its folder as a wheel in a new environment, and runs tests there.

The new environment has the packages of this environment, except editable installations. It starts without any built
device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pyproject.toml", "README.md", "src", "tests", "examples", "docs")
CHOSEN = ("tests/test_streams.py", "tests/executor/test_ends.py")


def run(*command: object, folder: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "SOFTMETAL"))}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "project"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for part in PARTS:
        source, target = ROOT / part, folder / part
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    return folder


@pytest.fixture(scope="module")
def python(copy: Path) -> Path:
    """Returns the interpreter of a new environment in which pip has installed the copy."""
    folder = copy.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=copy)
    paths = {"base": str(folder), "platbase": str(folder)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # Python adds these folders to its path, but ignores their .pth files, so editable installations are not visible.
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages / "others.pth").write_text("\n".join(others) + "\n")
    interpreter = Path(sysconfig.get_path("scripts", "venv", paths)) / "python"
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    run(interpreter, "-m", "pip", "install", *options, copy, folder=copy)
    return interpreter


def test_the_wheel_has_all_files(copy: Path, python: Path) -> None:
    shown = run(python, "-c", "import softmetal; print(softmetal.__path__[0])", folder=copy)
    package = Path(shown.strip())
    assert package.is_relative_to(copy.parent / "environment")

    def files(folder: Path) -> set[Path]:
        return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    assert files(package) == files(copy / "src" / "softmetal")


@pytest.mark.whole
def test_it_runs_kernels_without_the_repository(copy: Path, python: Path) -> None:
    run(python, "-c", "import importlib.util as u; assert not u.find_spec('torch_marlin_metal')", folder=copy)
    program = (copy / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "device.compile" in program
    run(python, "-c", program, folder=copy, XDG_CACHE_HOME=str(copy.parent / "cache"))
    assert (copy.parent / "cache" / "softmetal" / "libsoftmetal_executor.so").exists()


@pytest.mark.whole
def test_its_tests_pass_without_the_repository(copy: Path, python: Path) -> None:
    command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHOSEN)
    cache = copy.parent / "cache"
    assert " passed" in run(*command, folder=copy, XDG_CACHE_HOME=str(cache))
    assert (cache / "softmetal" / "libsoftmetal.so").exists()
