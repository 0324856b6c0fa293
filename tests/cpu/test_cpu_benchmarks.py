"""Tests that the CPU benchmarks of mixtures of experts and of training run, and that the code they time is correct."""

import argparse
import importlib
import json
import multiprocessing
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import torch_marlin_metal as tmm
from tests.support.reference import E2M1

FOLDER = Path(__file__).parents[2] / "benchmarks/cpu"


@pytest.fixture
def experts(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("cpu_experts")


@pytest.fixture
def training(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("cpu_training")


def run(script: str, record: Path, *arguments: str) -> tuple[str, list[dict]]:
    """Runs a benchmark with one thread and returns what it printed and recorded."""
    command = [sys.executable, str(FOLDER / script), "--threads", "1", "--json", str(record), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(line) for line in record.read_text().splitlines()]


def exact_block(gate_up: np.ndarray, down: np.ndarray, x: np.ndarray, ids: np.ndarray, weights: np.ndarray):
    """Computes the block token by token in fp64 from weights [E, N, K]."""
    out = np.zeros_like(x)
    for token, chosen in enumerate(ids):
        for expert, weight in zip(chosen, weights[token], strict=True):
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            out[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("layer", ["tiny", "gpt-oss-20b"])
def test_every_variant_computes_the_block(experts, monkeypatch, layer):
    shape = experts.LAYERS[layer]._replace(experts=5, hidden=64, intermediate=96)
    made: list = []
    plain = experts.Projection.dense
    monkeypatch.setattr(experts.Projection, "dense", lambda self, dtype: made.append(plain(self, dtype)) or made[-1])
    monkeypatch.setattr(experts, "cold_bytes", lambda: 1)
    block = experts.Block(shape, torch.float32)
    x, routing = torch.randn(7, 64), experts.route(shape, 7)
    expected = exact_block(*(t.double().numpy() for t in (*made, x)), routing.ids.numpy(), routing.weights.numpy())
    for name in experts.VARIANTS:
        got = block.calls[name][0](x, routing).double().numpy()
        assert np.linalg.norm(got - expected) < 1e-5 * np.linalg.norm(expected), name
    block.check(x, routing)
    block.calls["linear loop"] = [lambda *_: torch.zeros(7, 64)]
    with pytest.raises(AssertionError, match="linear loop and moe_gemm differ"):
        block.check(x, routing)


@pytest.mark.parametrize("layer", ["tiny", "qwen3-30b", "gpt-oss-20b"])
def test_ggml_gets_the_weights_of_this_package(experts, layer):
    """The blocks are decoded as ggml defines them. The low halves of the 16 bytes are the first 16 codes."""
    shape = experts.LAYERS[layer]
    projection = experts.Projection(shape._replace(experts=2), 256, 24)
    blocks = projection.stack().blocks(1)
    codes = np.concatenate([blocks["codes"] & 15, blocks["codes"] >> 4], axis=2)
    if shape.weight_format == "mxfp4":
        values, scales = np.array(E2M1)[codes], 2.0 ** (blocks["scale"].astype(np.float64) - 127)
    else:
        values, scales = codes - 8.0, blocks["scale"].astype(np.float64)
    decoded = (values * scales[:, :, None]).reshape(24, 256)
    expected = projection.dense(torch.float32)[1].double().numpy()
    # fp16 keeps fewer bits of a scale below 2^-14
    np.testing.assert_allclose(decoded, expected, rtol=1e-6, atol=8 * 2.0**-25)


def test_calls_of_a_round_share_weights_and_routing(experts):
    seen: list = []
    block = experts.Block.__new__(experts.Block)
    block.calls = {
        name: [lambda x, routing, c=copy, n=name: seen.append((n, c, routing)) for copy in range(2)] for name in "ab"
    }
    calls = block.timed(torch.zeros(1), ["first", "second", "third"])
    for index, name in enumerate("abbaabba"):
        calls[name](index)
    rounds = [{(copy, routing) for _, copy, routing in seen[i : i + 2]} for i in range(0, 8, 2)]
    assert rounds == [{(0, "first")}, {(1, "second")}, {(0, "third")}, {(1, "first")}]


def test_memory_is_that_of_the_variants_own_weights(experts):
    shape = experts.Shape(8, 1024, 1024, 2)
    context = multiprocessing.get_context("spawn")
    for variant, nominal in (("gemm loop", 8 * 3 * 2**20 * 33 / 64), ("linear loop", 8 * 3 * 2**20 * 2)):
        ours, theirs = context.Pipe()
        process = context.Process(target=experts.measure_memory, args=(theirs, variant, [shape], 512, 1))
        process.start()
        theirs.close()  # so that recv raises EOFError if the process fails
        ours.recv()  # the process measures the tiny layer before the given shapes
        weights, peak = ours.recv()
        process.join()
        assert 0.9 * nominal < weights < 1.3 * nominal + 2**22, variant
        assert 2**20 < peak < 2**26  # an intermediate result of all pairs takes 4 MiB


def test_experts_benchmark_prints_and_records_every_line(tmp_path):
    printed, lines = run(
        "cpu_experts.py", tmp_path / "record", "--layers", "tiny", "--tokens", "1", "5", "--no-memory"
    )  # fmt: skip
    assert [(line["dtype"], line["tokens"]) for line in lines] == [("bf16", 1), ("bf16", 5), ("fp32", 1), ("fp32", 5)]
    for line in lines:
        assert set(line["ratios"]) == {"gemm loop", "grouped_mm", "linear loop"}
        assert line["isa"] == tmm.cpu_capability().isa and line["rounds"] >= 3
        assert re.search(
            rf"^\| {line['tokens']} \| .* \| {line['ratios']['grouped_mm']:.2f} \| ", printed, re.MULTILINE
        )


def test_experts_benchmark_names_what_it_leaves_out(experts, capsys):
    options = argparse.Namespace(tokens=[1], dtypes=["bf16"], threads=1)
    layers = {"tiny": experts.LAYERS["tiny"]}
    experts.compare(options, layers, time.monotonic() - 1, experts.Record(None))
    assert capsys.readouterr().out == "\nleft out for want of time: tiny in bf16\n"


def test_experts_benchmark_divides_the_rivals_time_by_ours(experts, monkeypatch, tmp_path):
    seconds = {"moe_gemm": 2.0, "gemm loop": 3.0, "grouped_mm": 4.0, "linear loop": 1.0}
    monkeypatch.setattr(experts, "time_calls", lambda *_, **__: {name: [time] * 3 for name, time in seconds.items()})
    options = argparse.Namespace(tokens=[4], dtypes=["bf16"])
    record = experts.Record(tmp_path / "record")
    experts.compare(options, {"tiny": experts.LAYERS["tiny"]}, time.monotonic() + 60, record)
    line = json.loads(record.path.read_text())
    assert line["ratios"] == {"gemm loop": 1.5, "grouped_mm": 2.0, "linear loop": 0.5}
    assert line["microseconds"] == {name: 1e6 * time for name, time in seconds.items()}


def test_experts_benchmark_refuses_fewer_experts_than_top_k(experts, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cpu_experts.py", "--layers", "tiny", "--experts", "1"])
    with pytest.raises(SystemExit):
        experts.main()
    assert "--experts: expected at least 2, the top_k of tiny, got 1" in capsys.readouterr().err


def test_training_products_are_those_of_the_same_weight(training, monkeypatch):
    monkeypatch.setattr("cpu_gemm.cold_bytes", lambda: 1)
    layer = training.Packed(64, 96, "nf4", 64)
    exact = tmm.dequantize(layer.weights[1], torch.float32).double()
    x, gradient = torch.randn(5, 64), torch.randn(5, 96)
    for got, expected in (
        (layer.forward(x, 1), x.double() @ exact),
        (layer.transposed(gradient, 1), gradient.double() @ exact.T),
        (training.both(layer, x, gradient, 1), gradient.double() @ exact.T),
    ):
        assert (got.double() - expected).norm() < 1e-5 * expected.norm()


def test_training_benchmark_divides_the_dense_time_by_ours(training, monkeypatch, tmp_path):
    def time_calls(calls: dict, *_: object, **__: object) -> dict:
        return {name: [len(name.split()[0]) * (3.0 if "dense" in name else 2.0)] * 3 for name in calls}

    monkeypatch.setattr(training, "time_calls", time_calls)
    monkeypatch.setattr(training, "onednn_kernels", lambda call: "stub")
    options = argparse.Namespace(
        threads=torch.get_num_threads(), shapes=["512x1024"], rows=[3], json=tmp_path / "record"
    )
    training.measure(options, tmm.cpu_capability().isa, 1.0)
    for line in map(json.loads, options.json.read_text().splitlines()):
        assert line["ratios"] == {"uint4b8": 1.5, "nf4": 1.5}
        assert line["microseconds"]["nf4"] == 2e6 * len(line["product"])


def test_training_benchmark_names_the_kernels_that_ran(tmp_path):
    kernel_set = "avx2" if "avx2" in tmm.cpu_capability().available else tmm.cpu_capability().isa
    printed, lines = run("cpu_training.py", tmp_path / "record", "--shapes", "512x1024", "--rows", "3", "--sets",
                         kernel_set, "--minutes", "2")  # fmt: skip
    assert [line["product"] for line in lines] == ["forward", "transposed", "both"]
    assert {line["isa"] for line in lines} == {kernel_set}
    assert f"{kernel_set}: gemm: {kernel_set} of this package; dense forward: " in printed
    assert set(lines[0]["ratios"]) == {"uint4b8", "nf4"}
