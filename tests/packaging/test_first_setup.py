"""Tests the output of `make` before it downloads and compiles, and while it compiles."""

import subprocess
import sys
from pathlib import Path

import pytest

from build_support.progress import shorten

ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="on a Mac, pip's usual build of PyTorch is small")


def commands_of_setup(folder: Path, *arguments: str) -> str:
    """Returns the commands with which `make` would set up a new environment."""
    command = ["make", "--no-print-directory", "--dry-run", f"VENV={folder}", *arguments, f"{folder}/.installed"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def announcement(python: str, index: str) -> str:
    command = ["sh", "scripts/announce_setup.sh", python, index]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@linux
def test_the_set_up_prefers_the_build_for_cpus(tmp_path: Path) -> None:
    lines = commands_of_setup(tmp_path / "venv").splitlines()
    (torch,) = [line for line in lines if "torch==" in line and "pip install" in line]
    assert torch.endswith("--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0")
    says = next(i for i, line in enumerate(lines) if "announce_setup.sh" in line)
    assert says < lines.index("sh scripts/system_packages.sh install") < lines.index(torch)


@linux
def test_pips_usual_build_can_be_chosen(tmp_path: Path) -> None:
    assert "index-url" not in commands_of_setup(tmp_path / "venv", "TORCH_INDEX=")


@linux
def test_the_set_up_says_how_much_it_fetches_and_how_to_change_that() -> None:
    usual, small = announcement("no-such-python", ""), announcement("no-such-python", "https://index")
    assert "3.0 GB" in usual and "Without TORCH_INDEX=" in usual
    assert "0.5 GB" in small and "https://index" in small and "`make TORCH_INDEX=`" in small
    assert "minutes on two cores" in usual and "minutes on two cores" in small


@linux
def test_nothing_is_said_where_torch_is_installed() -> None:
    assert announcement(sys.executable, "") == ""


def test_the_build_shows_a_file_in_a_line() -> None:
    """A process and its child print ninja's output; all other lines are shown unchanged."""
    compile_line = "[8/79] ccache c++ -MMD -I/include -c -c /root/csrc/core/x.cpp -o /root/build/x.o -std=c++20"
    program = f"""
import os, subprocess
from build_support.progress import short_lines
with short_lines("/root"):
    print({compile_line!r})
    subprocess.run(["echo", "x.cpp:1:2: error: no"])
print({compile_line!r})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[8/79] csrc/core/x.cpp", "x.cpp:1:2: error: no", compile_line]
    compiles = [f"[{done}/74] c++ -c /root/{done}.mm -o a.o\n" for done in range(1, 75)]
    tenths = (8, 15, 23, 30, 37, 45, 52, 60, 67, 74)
    assert list(shorten(compiles, "/root", False)) == [f"[{done}/74] {done}.mm\n" for done in tenths]
    shown = "".join(shorten([compiles[0], compiles[1], "warning\n", compiles[73]], "/root", True))
    clear = "\r\033[K"
    assert shown == f"{clear}[1/74] 1.mm{clear}[2/74] 2.mm\nwarning\n{clear}[74/74] 74.mm\n"
