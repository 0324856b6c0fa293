"""Runs the numerics tests for each instruction set that this machine supports."""

import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import torch_marlin_metal as tmm
from tests.support.programs import run_python

FAMILIES = [isa for isa in tmm.cpu_capability().available if isa != tmm.cpu_capability().isa]
FILES = ("test_gemm.py", "test_eight_bits.py", "test_int8_activations.py", "test_block_scales.py")
MODULES = [str(Path(__file__).with_name(name)) for name in FILES]
VARIABLE = "TORCH_MARLIN_METAL_CPU_ISA"


def run_forced(isa: str, *command: str) -> CompletedProcess[str]:
    # mps=True because the tests' conftest.py creates the device
    return run_python(*command, mps="pytest" in command, env={**os.environ, VARIABLE: isa})


@pytest.mark.parametrize("isa", FAMILIES)
def test_numerics_hold_for(isa, everything):
    wide = "nan_codes or minus_118 or (e4m3 and products_are) or rounded_activations or products_of_blocks"
    selection = (
        "cpu or minus_118 or rounded_activations or of_blocks"
        if everything
        else f"cpu-24- or cpu-136- or dequantize_rounds or {wide}"
    )
    done = run_forced(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", *MODULES, "-k", f"({selection}) and not mps")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("isa", tmm.cpu_capability().available)
def test_the_variable_forces_a_family(isa):
    done = run_forced(isa, "-c", "import torch_marlin_metal as t; c = t.cpu_capability(); print(c.isa, '|', c.reason)")
    name, reason = done.stdout.strip().split(" | ")
    assert name == isa
    assert VARIABLE in reason


def test_an_unknown_family_is_an_error_that_lists_the_known_ones():
    done = run_forced("sse9", "-c", "import torch_marlin_metal as t; t.cpu_capability()")
    assert done.returncode != 0
    assert f"{VARIABLE}: expected one of {', '.join(tmm.cpu_capability().available)}, got 'sse9'" in done.stderr
