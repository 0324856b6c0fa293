"""The NEON kernels, cross-compiled for aarch64 Linux and run under qemu: the same plain C++ tests, no torch."""

import shutil
import subprocess
from pathlib import Path

import pytest
from test_cpu_kernels import build

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"NEON under emulation needs {COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu qemu-user-static)",
)


def test_neon_against_fp64(tmp_path: Path) -> None:
    programs = build(tmp_path, "-O2", "-static", compiler=COMPILER)
    for test, program in programs.items():
        done = subprocess.run([EMULATOR, str(program), "1"], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith(" 0 failed\n")
        assert "neon" in done.stdout, test
