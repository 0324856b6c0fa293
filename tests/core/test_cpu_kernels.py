"""The CPU kernels alone, without torch: compiles tests/core/cpu_kernels_test.cpp with one command and runs it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Checks of alignment, null and pointer arithmetic triple the compile time of the unrolled kernels.
SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize=alignment,null,pointer-overflow,object-size,vptr",
    "-fno-sanitize-recover=undefined",
)


def build(directory: Path, *flags: str, compiler: str | None = None) -> Path:
    """Compiles the test program into `directory` and returns its path."""
    compiler = compiler or os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler: install g++"
    program = directory / "cpu_kernels_test"
    kernels = sorted(path for path in (ROOT / "csrc/cpu").glob("*.cpp") if path.name != "ops_cpu.cpp")
    sources = [ROOT / "tests/core/cpu_kernels_test.cpp", *kernels]
    command = [compiler, "-std=c++20", *flags, "-Wall", "-Wextra", "-Werror", *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cpu_kernels"), "-O2")


def run(program: Path, *arguments: str, isa: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_MARLIN_METAL_CPU_ISA"}
    if isa is not None:
        environment["TORCH_MARLIN_METAL_CPU_ISA"] = isa
    return subprocess.run([str(program), *arguments], check=False, capture_output=True, text=True, env=environment)


def test_every_family_against_fp64(program: Path) -> None:
    done = run(program, "20")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 failed\n")
    available = run(program, "capability").stdout.split("available:")[1].split()
    for isa in available:
        assert f"{isa} threads=2: gemm, " in done.stdout


def test_sanitizers(tmp_path: Path) -> None:
    done = run(build(tmp_path, "-O1", "-g0", *SANITIZERS), "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 failed\n")


def test_family_is_forced_by_the_environment(program: Path) -> None:
    for isa in run(program, "capability").stdout.split("available:")[1].split():
        assert run(program, "capability", isa=isa).stdout.startswith(f"{isa}: forced by TORCH_MARLIN_METAL_CPU_ISA;")


@pytest.mark.parametrize(("isa", "reason"), [("avx1024", "is not a known family"), ("AVX2", "is not a known family")])
def test_unknown_family_is_an_error(program: Path, isa: str, reason: str) -> None:
    done = run(program, "capability", isa=isa)
    assert done.returncode == 1
    assert "TORCH_MARLIN_METAL_CPU_ISA: expected one of portable" in done.stdout
    assert f"got '{isa}', which {reason}" in done.stdout


def test_absent_family_is_an_error(program: Path) -> None:
    available = run(program, "capability").stdout.split("available:")[1].split()
    for isa in {"avx2", "avx512", "amx", "neon"} - set(available):
        done = run(program, "capability", isa=isa)
        assert done.returncode == 1
        assert f"got '{isa}', which this machine does not have" in done.stdout
