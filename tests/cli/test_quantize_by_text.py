"""Tests `quantize --memory --calibration`: a text shows which layers need more bits."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cli.test_cli import call
from tests.support.small_llama import save_small_llama
from torch_marlin_metal import convert, quantize_model


def test_a_limit_of_memory_is_spent_by_a_text(tmp_path: Path) -> None:
    """The command chooses the same formats as quantize_model with the same pieces of the text."""
    folder = save_small_llama(tmp_path / "floats")
    ids = torch.arange(1100) * 7 % 90 + 1
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in ids.tolist()))
    line = ("quantize", folder, tmp_path / "out", "--memory", "250kB", "--device", "cpu", "--json")
    code, out, err = call(*line, "--calibration", tmp_path / "text.txt")
    assert code == 0, out + err
    found = json.loads(out)
    model = AutoModelForCausalLM.from_pretrained(folder)
    fit = quantize_model(model, memory="250kB", calibration=ids[:1024].view(2, 512), progress=False).fit
    assert len(found["formats"]) > 1
    for weight in convert.read_layers(tmp_path / "out"):
        layer = model.get_submodule(weight.name)
        assert (weight.weight_format, weight.group_size) == (layer.weight_format, layer.group_size)
    assert found["error"] == pytest.approx(fit.error)


def test_a_text_needs_a_limit_and_a_piece(tmp_path: Path) -> None:
    folder = save_small_llama(tmp_path / "floats")
    text = tmp_path / "text.txt"
    text.write_text("w1 w2")
    for options, message in (
        ((), "--calibration: expected --memory with it"),
        (("--memory", "1MB"), "text.txt: expected at least 512 tokens, got 2"),
    ):
        code, out, err = call("quantize", folder, tmp_path / "out", "--calibration", text, *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
