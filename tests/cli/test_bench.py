"""Tests what the tables of `torch-marlin-metal bench` contain. Times on the software device mean nothing."""

import importlib
import json
from contextlib import contextmanager

import pytest
import torch
from typer.testing import CliRunner

import torch_marlin_metal as tmm
from torch_marlin_metal.cli import bench_mlstm
from torch_marlin_metal.cli.app import app

bench_module = importlib.import_module("torch_marlin_metal.cli.bench")

uses_mps = pytest.mark.usefixtures("mps")


def test_bench_command_on_the_cpu():
    done = CliRunner().invoke(
        app,
        [
            "bench",
            "--device",
            "cpu",
            "--shape",
            "64,128",
            "--rows",
            "1",
            "--rounds",
            "3",
            "--cold-mb",
            "1",
            "--dtype",
            "bfloat16",
            "--json",
        ],
    )
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


def test_bench_of_the_mlstm_times_both_ways_forward_and_backward(device, monkeypatch):
    for name, size in (("HEADS", 1), ("DK", 8), ("DV", 16)):
        monkeypatch.setattr(bench_mlstm, name, size)
    options = [
        "bench",
        "mlstm",
        "--device",
        device,
        "--dtype",
        "float32",
        "--rounds",
        "3",
        "--rows",
        "2",
        "--rows",
        "5",
    ]
    done = CliRunner().invoke(app, [*options, "--json"])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)["results"]
    assert [(row["pass"], row["S"]) for row in results] == [
        (name, S) for name in ("forward", "forward and backward") for S in (2, 5)
    ]
    for row in results:
        assert set(row["seconds"]) == set(bench_mlstm.METHODS) and min(row["seconds"].values()) > 0
        assert row["times_faster"] > 0


def test_bench_of_the_mlstm_divides_the_token_by_token_time_by_the_chunkwise_time(monkeypatch):
    clock = iter([1.0, 3.0] * 100)
    monkeypatch.setattr(bench_mlstm, "_seconds", lambda *_: next(clock))
    (forward, backward) = bench_mlstm.measure_mlstm("cpu", torch.float32, (5,), 3, quiet=True)
    assert forward["seconds"] == {"chunkwise": 1.0, "token by token": 3.0} == backward["seconds"]
    assert forward["times_faster"] == 3.0


def test_bench_of_the_mlstm_refuses_two_forms_that_disagree(monkeypatch):
    monkeypatch.setattr(bench_mlstm, "_token_by_token", lambda *inputs: inputs[2])
    done = CliRunner().invoke(app, ["bench", "mlstm", "--device", "cpu", "--rows", "3"])
    assert done.exit_code == 3 and "the two ways differ" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["gemm"], "bench: expected products, mlstm, or the path of a model, got 'gemm'"),
        (["mlstm", "--shape", "64,64"], "bench mlstm: expected no --shape"),
    ],
)
def test_bench_names_a_wrong_table(options, message):
    done = CliRunner().invoke(app, ["bench", *options, "--device", "cpu"])
    assert done.exit_code == 2 and message in done.output


@uses_mps
def test_bench_captures_each_product_once(monkeypatch, tmp_path):
    """Replaces Xcode's capture with a function that records the products that run during the capture."""
    captured, calls = [], []

    @contextmanager
    def recorded(**options):
        captured.append(options)
        calls.clear()
        yield
        captured.append(list(calls))

    product = bench_module.gemm

    def counted(a, weight):
        calls.append((weight.N, a.shape[0]))
        return product(a, weight)

    monkeypatch.setattr(bench_module, "trace", recorded)
    monkeypatch.setattr(bench_module, "gemm", counted)
    path = tmp_path / "products.gputrace"
    options = f"--shape 64,128 --rows 1 --rows 3 --group-size 32 --rounds 3 --cold-mb 1 --capture {path} --json"
    done = CliRunner().invoke(app, ["bench", *options.split()])
    assert done.exit_code == 0, done.output
    assert captured == [{"capture": path, "wait_until_completed": True}, [(64, 1), (64, 3)]]
