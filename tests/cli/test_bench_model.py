"""Tests that `torch-marlin-metal bench MODEL` measures the same tests as llama-bench. Times here mean nothing."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

import torch_marlin_metal as tmm
from tests.support.documented_keys import documented, keys_of
from tests.support.small_llama import WORDS, save_small_llama
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.cli.models import timing
from torch_marlin_metal.cli.models.opened import Opened
from torch_marlin_metal.integrations.transformers import MarlinConfig, quantizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small_llama(tmp_path_factory.mktemp("small"), tokenizer=False)


def test_each_test_is_timed_from_an_empty_cache_in_single_steps(folder, monkeypatch):
    """A fake clock ticks once for each call of the model, so that each rate is a simple number."""
    calls = []
    forward = LlamaForCausalLM.forward

    def counted(self, **inputs):
        held = inputs.get("past_key_values")
        calls.append((tuple(inputs["input_ids"].shape), 0 if held is None else held.get_seq_length()))
        output = forward(self, **inputs)
        assert output.logits.shape[1:] == (1, WORDS), "logits of the last token only"
        return output

    counted.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: float(len(calls))))
    line = ["bench", folder, "--device", "cpu", "--rounds", 3, "--batch", 1, "--batch", 2, "--weight-format", "nf4"]
    line += ["--prompt-tokens", 8, "--new-tokens", 3, "--json", "--no-fuse"]
    done = CliRunner().invoke(app, list(map(str, line)))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    parts = [part for batch in (1, 2) for part in ([((batch, 8), 0)], [((batch, 1), held) for held in range(3)])]
    assert calls == [call for part in parts for _ in range(4) for call in part]
    rates = {(row["test"], row["batch"]): row["tokens_per_second"] for row in found["results"]}
    assert rates == {("pp8", 1): 8, ("tg3", 1): 1, ("pp8", 2): 16, ("tg3", 2): 2}
    assert all(row["spread"] == 0 and len(row["rounds"]) == 3 for row in found["results"])
    assert found["packed"] == {"uint8b128 g128": 2, "lut4 g128": 14}
    assert found["machine"]["device"] == "cpu"
    assert keys_of(found) == documented("bench MODEL") - {"gpu"}


def test_the_table_and_a_wrong_use(folder, device, monkeypatch):
    # does not compile in advance, because most of these kernels would be for other prompts
    monkeypatch.setattr(quantizer, "prepare", lambda model, progress: 0)
    line = ["bench", str(folder), "--new-tokens", "2", "--rounds", "3", "--device", device, "--weight-format", "uint4"]
    done = CliRunner().invoke(app, line)
    assert (done.exit_code, "tg2" in done.stdout, "pp512" in done.stdout) == (0, True, False), done.output
    assert ("predicted" in done.stdout) == (device == "mps")
    assert "layers of uint4 g128" in done.stdout
    for wrong, sentence in (
        ((str(folder), "--shape", "64,64", "--group-size", "32"), "bench MODEL: expected no --shape and --group-size"),
        ((str(folder), "--cold-mb", "1"), "bench MODEL: expected no --cold-mb, for products only"),
        (("--batch", "2", "--no-fuse"), "bench: expected no --batch and --no-fuse, for a model only"),
    ):
        done = CliRunner().invoke(app, ["bench", *wrong])
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
        assert sentence in done.stderr


@pytest.mark.usefixtures("mps")
def test_the_prediction_is_the_planners_for_every_packed_product(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MarlinConfig("uint4", 32))
    N_K = [(128, 128), (64, 128), (64, 128), (128, 128), (256, 128), (256, 128), (128, 256)]
    plans = [
        tmm.profiling.plan(6, *sizes, weight_format="uint4", group_size=32, dtype=torch.float32) for sizes in 2 * N_K
    ]
    expected = sum(found.chosen.seconds for found in plans)
    # sizes of the output layer, which computes only the last token of each sequence
    sizes = model.lm_head.out_features, 128
    head = tmm.profiling.plan(2, *sizes, weight_format="uint8b128", group_size=32, dtype=torch.float32)
    expected += head.chosen.seconds
    assert timing._predicted(Opened(folder, model, "mps", 0.0), 6, 2) == pytest.approx(expected)
    assert timing._predicted(Opened(folder, model, "cpu", 0.0), 6, 2) is None
