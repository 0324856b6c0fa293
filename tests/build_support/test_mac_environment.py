"""Checks the environment variables of a build on a Mac. The tests run on any machine."""

import _osx_support
import os
from pathlib import Path

import pytest

from build_support.mac_environment import mac_environment
from tests.support.programs import run_python

ROOT = Path(__file__).parents[2]
UNIVERSAL2 = {  # the values of python.org's Python 3.11
    "CC": "clang",
    "CFLAGS": "-fno-strict-overflow -Wsign-compare -arch arm64 -arch x86_64 -g",
    "LDSHARED": "clang -bundle -undefined dynamic_lookup -arch arm64 -arch x86_64 -g",
}


def test_only_unset_variables_are_set_and_only_on_macs() -> None:
    assert mac_environment("linux", {}) == {}
    assert mac_environment("darwin", {}) == {
        "ARCHFLAGS": "-arch arm64",
        "MACOSX_DEPLOYMENT_TARGET": "14.0",
        "_PYTHON_HOST_PLATFORM": "macosx-14.0-arm64",
    }
    chosen = {"MACOSX_DEPLOYMENT_TARGET": "15.0", "ARCHFLAGS": ""}
    assert mac_environment("darwin", chosen) == {"_PYTHON_HOST_PLATFORM": "macosx-14.0-arm64"}


def test_a_universal2_python_compiles_for_arm64_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "clang")  # keeps setuptools from searching for a compiler
    for name, value in mac_environment("darwin", {}).items():
        monkeypatch.setenv(name, value)
    flags = _osx_support.customize_compiler(dict(UNIVERSAL2))
    for name in ("CFLAGS", "LDSHARED"):
        assert "x86_64" not in flags[name], flags[name]
        assert flags[name].count("-arch") == 1, flags[name]
        assert "-arch arm64" in flags[name], flags[name]


def test_setup_sets_the_environment_before_it_builds() -> None:
    script = (
        "import os, runpy, sys, sysconfig, torch, torch.utils.cpp_extension\n"
        "sysconfig.get_config_vars()  # caches these, because this Python has no variables of a Mac\n"
        "sys.platform, sys.argv = 'darwin', ['setup.py', '--quiet', '--name']\n"
        "runpy.run_path('setup.py')\n"
        "print(os.environ.get('ARCHFLAGS'), os.environ.get('MACOSX_DEPLOYMENT_TARGET'))"
    )
    bare = {name: value for name, value in os.environ.items() if name not in ("ARCHFLAGS", "MACOSX_DEPLOYMENT_TARGET")}
    done = run_python("-c", script, cwd=ROOT, env=bare)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "-arch arm64 14.0"
