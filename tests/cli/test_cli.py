"""Tests the exit codes, the JSON and the errors of the commands, on checkpoints that other programs wrote."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from torch_marlin_metal import convert, quantize_weight
from torch_marlin_metal.checkpoints import writer
from torch_marlin_metal.checkpoints.files.shard_writer import ShardWriter
from torch_marlin_metal.cli.app import app

DATA = Path(__file__).parents[1] / "data/layers"
GPTQ = DATA / "gptq/gptqmodel-asym-g64-v1"
ACT_ORDER = DATA / "gptq/gptqmodel-sym-g32-actorder-v1"


def call(*arguments: object, stdin: str = "") -> tuple[int, str, str]:
    """Runs a command in this process. Returns its exit code, its output and its errors."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, done.stdout, done.stderr


def answer(*arguments: object) -> tuple[int, dict]:
    code, out, _ = call(*arguments, "--json")
    return code, json.loads(out)


def test_inspect_describes_a_checkpoint():
    code, found = answer("inspect", ACT_ORDER)
    assert code == 0
    assert (found["format"], found["refused"], found["other_tensors"]) == ("gptq", 0, 0)
    (layer,) = found["layers"]
    assert (layer["N"], layer["K"], layer["weight_format"], layer["group_size"]) == (64, 256, "uint4b8", 32)
    assert layer["act_order"]
    code, out, _ = call("inspect", ACT_ORDER)
    assert code == 0
    assert "model.layers.0.self_attn.k_proj" in out
    assert "uint4b8" in out
    assert call("inspect", ACT_ORDER, "--no-layers")[1].count("uint4b8 g32, act-order") == 1


def test_convert_and_verify_round_trip(tmp_path):
    code, made = answer("convert", ACT_ORDER, tmp_path / "native")
    assert (code, made["format"], made["layers"]) == (0, "native", 1)
    assert answer("convert", tmp_path / "native", tmp_path / "gptq", "--format", "gptq")[0] == 0
    code, compared = answer("verify", tmp_path / "gptq", ACT_ORDER)
    assert code == 0
    assert compared["equal"]
    assert [(layer["codes"], layer["max_error"]) for layer in compared["layers"]] == [(True, 0.0)]
    before, after = load_file(ACT_ORDER / "model.safetensors"), load_file(tmp_path / "gptq/model-00001.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_verify_finds_one_changed_code(tmp_path):
    shutil.copytree(GPTQ, tmp_path / "changed")
    tensors = load_file(GPTQ / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("qweight"))
    tensors[name][3, 5] ^= 1 << 8
    save_file(tensors, tmp_path / "changed/model.safetensors")
    code, compared = answer("verify", tmp_path / "changed", GPTQ)
    assert (code, compared["equal"], compared["layers"][0]["codes"]) == (1, False, False)
    assert 0 < compared["layers"][0]["max_error"] < 1
    assert answer("verify", tmp_path / "changed", GPTQ, "--tolerance", "1")[0] == 0
    assert "differ" in call("verify", tmp_path / "changed", GPTQ)[1]


def float_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"blocks.{i}.{name}.weight": torch.randn(48, 64) for i in range(3) for name in ("up", "down")}
    tensors |= {"blocks.0.up.bias": torch.randn(48), "embed.weight": torch.randn(10, 64), "norm.weight": torch.ones(64)}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "own"}))
    return tensors


@pytest.mark.parametrize(("weight_format", "method"), [("uint4b8", "rtn"), ("nvfp4", "mse")])
def test_quantize_gives_what_quantize_weight_gives(tmp_path, weight_format, method):
    tensors = float_checkpoint(tmp_path / "floats")
    code, made = answer(
        "quantize", tmp_path / "floats", tmp_path / "out", "--weight-format", weight_format, "--method", method,
        "--include", "blocks.*", "--exclude", "*.2.down", *([] if weight_format == "nvfp4" else ["--group-size", 32]),
    )  # fmt: skip
    assert (code, made["layers"]) == (0, 5)
    group_size = 16 if weight_format == "nvfp4" else 32
    reader = convert.open_reader(tmp_path / "out")
    for weight in reader:
        expected = quantize_weight(tensors[f"{weight.name}.weight"], weight_format, group_size, method)
        assert torch.equal(weight.b_packed, expected.b_packed)
        assert torch.equal(weight.scales, expected.scales)
    others = dict(reader.other_tensors())
    assert others.keys() == {"blocks.2.down.weight", "embed.weight", "norm.weight"}
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in others.items())
    code, compared = answer("verify", tmp_path / "out", tmp_path / "floats")
    assert code == 1
    assert all(0 < layer["relative_error"] < 0.15 for layer in compared["layers"])


def test_quantize_takes_the_linear_modules_of_a_known_model(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is an optional extra")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "floats")
    code, made = answer("quantize", tmp_path / "floats", tmp_path / "out", "--group-size", "32")
    assert (code, made["layers"]) == (0, 9)
    assert made["formats"] == {"uint4b8": 7, "uint8b128": 2}
    assert {"lm_head", "model.embed_tokens"} < set(convert.open_reader(tmp_path / "out").layer_names)
    code, made = answer("quantize", tmp_path / "floats", tmp_path / "fits", "--memory", "30 kB")
    assert code == 0
    assert len(made["formats"]) > 1 and made["curve"][0]["error"] > made["error"] > made["curve"][-1]["error"]
    code, made = answer("quantize", tmp_path / "floats", tmp_path / "like", "--like", "Q4_K_M")
    assert (code, made["formats"]) == (0, {"uint5b16": 6, "uint8b128": 3})
    code, made = answer("quantize", tmp_path / "floats", tmp_path / "plain", "--vocabulary-format", "none")
    assert (code, made["layers"]) == (0, 7)


def test_inspect_names_what_would_be_refused(tmp_path):
    import numpy as np

    from tests.support import checkpoint_writers as writers

    writers.write_gptq(tmp_path / "small-groups", np.random.default_rng(0), 64, 16, 8)
    code, found = answer("inspect", tmp_path / "small-groups")
    assert (code, found["refused"]) == (1, 1)
    assert "no group size of the operators divides its groups of 8" in found["layers"][0]["refused"]
    assert call("convert", tmp_path / "small-groups", tmp_path / "out", "--on-unsupported", "dequantize")[0] == 0
    code, found = answer("inspect", GPTQ.parent.parent / "gguf/Q4_K/model.gguf")
    assert (code, found["format"]) == (0, "gguf")


def test_inspect_describes_a_checkpoint_of_floats(tmp_path):
    float_checkpoint(tmp_path / "floats")
    code, found = answer("inspect", tmp_path / "floats")
    assert (code, found["format"], len(found["matrices"])) == (0, "floats", 7)
    assert "not quantized" in call("inspect", tmp_path / "floats")[1]


def many_layers(path: Path) -> Path:
    path.mkdir()
    torch.manual_seed(0)
    save_file({f"layers.{i}.weight": torch.randn(256, 512) for i in range(24)}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


# A shard has at most 1 MB and starts with a header of 262 kB, so the 24 layers of 69 kB each fill several shards.
QUANTIZE = ("--include", "*", "--shard-mb", "1")


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("limit", [200_000, 700_000])
def test_a_file_that_cannot_grow_further(tmp_path, limit):
    """The system's limit on file sizes makes writes fail or truncates them, as on a full disk."""
    source = many_layers(tmp_path / "floats")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        code, out, err = call("quantize", source, tmp_path / "out", *QUANTIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, out) == (3, "")
    assert err.startswith("error: ")
    assert "model-00001.safetensors: " in err
    assert "cannot be written (File too large)" in err
    assert [file.name for file in tmp_path.iterdir()] == ["floats"]
    assert call("quantize", source, tmp_path / "out", *QUANTIZE)[0] == 0


def test_small_files_that_cannot_be_written(tmp_path):
    source = many_layers(tmp_path / "floats")
    (source / "tokenizer.json").write_bytes(bytes(3_000_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
        first = call("quantize", source, tmp_path / "out", *QUANTIZE)
        left = [file.name for file in tmp_path.iterdir()]
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_500_000, before[1]))
        second = call("quantize", source, tmp_path / "out", *QUANTIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert first[0] == second[0] == 3
    assert "cannot be written (File too large)" in first[2]
    assert left == ["floats"]
    assert "tokenizer.json: cannot be copied from" in second[2]
    assert not (tmp_path / "out").exists()
    assert call("quantize", source, tmp_path / "out", *QUANTIZE)[0] == 0
    assert (tmp_path / "out/tokenizer.json").stat().st_size == 3_000_000


@pytest.fixture
def ctrl_c():
    """Restores Ctrl-C, which the processes of pytest-xdist ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("shard_mb", [1, 100])
def test_ctrl_c_leaves_nothing_half_written_and_the_same_call_goes_on(tmp_path, monkeypatch, shard_mb):
    source = many_layers(tmp_path / "floats")
    arguments = ("--include", "*", "--shard-mb", shard_mb)
    assert call("quantize", source, tmp_path / "whole", *arguments, "--sync")[0] == 0
    original = ShardWriter.add

    def add(self, name, *rest):
        if name == "layers.9.scales":
            signal.raise_signal(signal.SIGINT)
        original(self, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", add)
        code, out, err = call("quantize", source, tmp_path / "out", *arguments)
    assert (code, out, err) == (130, "", "interrupted\n")
    partial = tmp_path / "out.partial"
    assert partial.exists() == (shard_mb == 1)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    for file in partial.glob("*.safetensors"):
        load_file(file)
    assert call("quantize", source, tmp_path / "out", *arguments)[0] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not partial.exists()


@pytest.mark.usefixtures("ctrl_c")
def test_a_shard_that_a_power_failure_cut_off_is_not_trusted(tmp_path, monkeypatch):
    source = many_layers(tmp_path / "floats")
    assert call("quantize", source, tmp_path / "whole", *QUANTIZE)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write_rest", lambda *_: signal.raise_signal(signal.SIGINT))
        assert call("quantize", source, tmp_path / "out", *QUANTIZE)[0] == 130
    first = tmp_path / "out.partial/model-00001.safetensors"
    os.truncate(first, 1000)
    assert call("quantize", source, tmp_path / "out", *QUANTIZE)[0] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_missing_package_is_one_error(monkeypatch):
    import sys

    from torch_marlin_metal.cli.main import main

    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "torch_marlin_metal.cli.app")
    with pytest.raises(SystemExit, match="the command line needs the package typer: pip install typer"):
        main()
