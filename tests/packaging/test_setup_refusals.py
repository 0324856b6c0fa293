"""Tests the errors of setup.py on machines that cannot build the extension, and its search for ninja."""

import os
from pathlib import Path

from tests.support.programs import run_python

ROOT = Path(__file__).resolve().parents[2]


def build(tmp_path: Path, before: str, **environment: str) -> str:
    """Builds the extension in a process that runs `before` first. Returns the last line of standard error."""
    outputs = ["--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    run = f"import runpy, sys; {before}; sys.argv = ['setup.py', '--quiet', 'build_ext', *{outputs!r}]"
    program = f"{run}; runpy.run_path('setup.py', run_name='__main__')"
    done = run_python("-c", program, cwd=ROOT, env={**os.environ, **environment})
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_free_threaded_python(tmp_path: Path) -> None:
    pretend = "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1"
    assert "this is a free-threaded Python" in build(tmp_path, pretend)


def test_no_torch(tmp_path: Path) -> None:
    last = build(tmp_path, "sys.modules['torch'] = None")
    assert "torch is not installed" in last and "pip install torch==2.13.0" in last


def test_no_compiler(tmp_path: Path) -> None:
    last = build(tmp_path, "pass", CXX="no-such-compiler")
    assert "the C++ compiler `no-such-compiler` does not run" in last and last.endswith("; install g++ or clang.")


def test_no_compiler_on_a_mac(tmp_path: Path) -> None:
    """Without the command-line tools, a Mac's `c++` exists but fails."""
    # caches the settings of this system
    imports = "import setuptools, sysconfig, torch.utils.cpp_extension; sysconfig.get_config_vars()"
    last = build(tmp_path, f"{imports}; sys.platform = 'darwin'", CXX="false")
    assert "the C++ compiler `false` does not run" in last and last.endswith("; run `xcode-select --install`.")


def test_an_old_torch(tmp_path: Path) -> None:
    last = build(tmp_path, "import torch; torch.__version__ = '2.12.1'")
    assert "torch 2.12.1 is too old: 2.13 or newer is needed" in last


def test_ninja_is_found_in_an_environment_that_is_not_activated(tmp_path: Path) -> None:
    """Without ninja, PyTorch compiles one file at a time."""
    run = "import runpy, sys; sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py', run_name='__main__'); "
    found = f"{run}from torch.utils.cpp_extension import is_ninja_available as found; print(found())"
    done = run_python("-c", found, cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"
