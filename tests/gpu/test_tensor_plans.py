"""`plan` and `profile` list the variant for tensor units on the chips that have them, and on no other."""

import os
import sys

import pytest
from typer.testing import CliRunner

import torch_marlin_metal as tmm
from tests.support.programs import run_python
from torch_marlin_metal import profiling
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.profiling import AppleSiliconGPU

WITH_TENSOR_UNITS = {"M5", "M5 Pro", "M5 Max"}


@pytest.mark.parametrize("name", AppleSiliconGPU.names())
def test_tensor_is_a_candidate_on_chips_with_tensor_units_only(name):
    has_units = name in WITH_TENSOR_UNITS
    gpu = AppleSiliconGPU.from_name(name)
    assert gpu.has_tensor_units == has_units
    assert ("tensor_clocks_fp16" in str(gpu)) == has_units
    plan = tmm.profiling.plan(64, 4096, 4096, group_size=64, gpu=name)
    assert ("tensor" in {candidate.variant for candidate in plan.candidates}) == has_units
    tiles = {row.tile: row.simdgroups for row in profiling.tile_table(name).rows if row.variant == "tensor"}
    assert tiles == ({(32, 64, 32): 2, (32, 128, 32): 4, (64, 64, 32): 4, (64, 128, 32): 8} if has_units else {})


def test_a_plan_that_names_tensor():
    plan = tmm.profiling.plan(200, 4096, 4096, group_size=64, gpu="M5", variant="tensor")
    assert {candidate.variant for candidate in plan.candidates} == {"tensor"}
    launch = plan.chosen.dispatches[0]
    assert launch.function == "gemm_tensor_uint4b8_float16"
    assert launch.threads == (plan.chosen.tile[0] // 32 * (plan.chosen.tile[1] // 32) * 32, 1, 1)
    with pytest.raises(ValueError, match=r"gemm: variant: expected one that this GPU can run \(.*M5.*Apple7\), got"):
        tmm.profiling.plan(200, 4096, 4096, group_size=64, gpu="M1", variant="tensor")


@pytest.mark.parametrize(("gpu", "shown"), [("M5", True), ("M4", False)])
def test_the_commands_show_it(gpu, shown):
    for arguments in (["plan", "64", "4096", "4096"], ["profile", "--shape", "512,512", "--rows", "1"]):
        done = CliRunner().invoke(app, [*arguments, "--gpu", gpu, "--json"])
        assert done.exit_code == 0, done.output
        assert ('"tensor"' in done.output) == shown, arguments


@pytest.mark.usefixtures("mps")
@pytest.mark.skipif(sys.platform == "darwin", reason="makes the software Metal device an M5")
@pytest.mark.parametrize(
    ("environment", "has_units"),
    [
        ({"SOFTMETAL_FAMILY": "10"}, True),
        ({"SOFTMETAL_FAMILY": "10", "SOFTMETAL_MACOS": "26.1"}, False),
        ({"TORCH_MARLIN_METAL_GPU": "M5"}, False),
    ],
)
def test_this_machines_plans_follow_its_own_gate(environment, has_units):
    """`tune` and `doctor` run the variants that this machine supports, also when they plan for another chip."""
    program = (
        "from torch_marlin_metal import tuning\nfrom torch_marlin_metal.profiling import plan\n"
        "from torch_marlin_metal.gpu.tuning.tuner import candidates\n"
        "product = tuning.Product(N=64, K=128, weight_format='uint4b8', group_size=32, dtype='float16')\n"
        "print({row.variant for row in plan(64, 64, 128).candidates}, candidates(product, 64))\n"
    )
    done = run_python("-c", program, env={**os.environ, **environment}, mps=True)
    assert done.returncode == 0, done.stderr
    assert ("'tensor'" in done.stdout) == ("'tensor:" in done.stdout) == has_units, done.stdout
