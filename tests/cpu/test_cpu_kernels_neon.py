"""Cross-compiles the NEON kernels and the C++ test programs for aarch64 Linux and runs them under qemu."""

import shutil
import subprocess
from pathlib import Path

import pytest
from test_cpu_kernels import PRODUCTS, SOURCES, build

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
# qemu's CPU models, each with the features that the test program must report. The first has the features of Apple's M1,
# the second those of Apple's M2, and the third has no dot products.
CPUS = {"neoverse-n1": " dotprod", "max": " dotprod bf16 i8mm", "cortex-a72": ""}
# On this processor, the other sources compile to nothing.
FOR_ARM = [path for path in SOURCES if "x86" not in path.parts and "avx" not in path.stem]

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"NEON under emulation needs {COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu qemu-user-static)",
)


def emulate(cpu: str, program: Path, *arguments: str) -> str:
    done = subprocess.run(
        [EMULATOR, "-cpu", cpu, str(program), *arguments], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_neon_kernels_agree_with_fp64(run_folder: Path, everything: bool) -> None:
    others = {
        "cpu_weights_test": ["1"],
        "cpu_mlstm_test": ["1"],
        "cpu_plan_test": ["shapes"],
        "cpu_decoder_test": [],
    }
    # The NEON kernels compute the products. The portable kernels, which take longest to compile, are not optimized.
    programs = build(
        run_folder, "-O1", "-static", compiler=COMPILER, plain=(PRODUCTS,), plain_flags=("-O0",),
        programs=("cpu_kernels_test", *others), sources=FOR_ARM,
    )  # fmt: skip
    for cpu, features in list(CPUS.items())[: None if everything else 2]:
        kernels = programs["cpu_kernels_test"]
        assert f"features: asimd{features}; available: portable neon" in emulate(cpu, kernels, "capability")
        printed = emulate(cpu, kernels, "1", "best")
        assert printed.startswith("neon") and printed.endswith(" 0 failed\n")
    for test, arguments in others.items():
        printed = emulate("max", programs[test], *arguments)
        assert "neon" in printed and printed.endswith(" 0 failed\n")
