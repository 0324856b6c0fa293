"""Tests the contents of the tables of `torch-marlin-metal bench`. Times on the software device mean nothing."""

import json

import pytest
from typer.testing import CliRunner

import torch_marlin_metal as tmm
from torch_marlin_metal.cli.app import app

uses_mps = pytest.mark.usefixtures("mps")


def test_bench_command_on_the_cpu():
    options = "--device cpu --shape 64,128 --rows 1 --rounds 3 --cold-mb 1 --dtype bfloat16 --json"
    done = CliRunner().invoke(app, ["bench", *options.split()])
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    (row,) = value["results"]
    assert set(row["seconds"]) == {"torch_marlin_metal", "torch dense", "torch int4"}
    assert row["times_faster"]["torch_marlin_metal"] == 1.0
    assert all(seconds > 0 for seconds in row["seconds"].values())
    assert value["not_compared"] == {"two_pass": "a variant on mps only"}
    assert value["machine"]["device"] == "cpu"


@uses_mps
@pytest.mark.large
def test_bench_of_all_variants_shows_the_roof():
    options = "--shape 64,128 --group-size 32 --rows 2 --rounds 3 --cold-mb 1 --variant all"
    done = CliRunner().invoke(app, ["bench", *options.split(), "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["results"]
    plan = tmm.profiling.plan(2, 64, 128, group_size=32, tuned=False)
    assert {name.split(":")[0] for name in row["variants"]} == {candidate.variant for candidate in plan.candidates}
    assert row["chosen"] == plan.chosen.name == next(iter(row["variants"]))
    for found in row["variants"].values():
        assert found["seconds"] > 0
        gpu = tmm.profiling.AppleSiliconGPU.planned()
        memory = found["bytes_per_second"] / gpu.dram_bytes_per_second
        compute = 2 * 2 * 64 * 128 / found["seconds"] / gpu.matrix_flop_per_second
        assert found["of_roof"] == pytest.approx(max(memory, compute))
    refused = CliRunner().invoke(app, ["bench", "--device", "cpu", "--variant", "all"])
    assert refused.exit_code == 2
