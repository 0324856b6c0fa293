"""Tests `ReadOptions` in readers, models and the command line."""

import dataclasses

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

from tests.support.checkpoint_writers import LAYER, write_gptq
from torch_marlin_metal import convert
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.load.quantized import load_quantized


def test_options_and_fields_say_the_same(tmp_path) -> None:
    write_gptq(tmp_path, np.random.default_rng(1), 64, 16, 32, version=2)
    fields = {"gptq_version": 2, "gptq_zeros_rule": "masked", "on_unsupported": "skip"}
    options = convert.ReadOptions(**fields)
    assert convert.open_reader(tmp_path, options).options == convert.open_reader(tmp_path, **fields).options == options
    changed = convert.open_reader(tmp_path, options, gptq_version=1).options
    assert changed == dataclasses.replace(options, gptq_version=1)
    assert convert.open_reader(tmp_path).layer_names == [LAYER]


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        convert.ReadOptions().gptq_version = 1


@pytest.mark.parametrize("read", [lambda *a, **k: list(convert.read_layers(*a, **k)), convert.open_reader])
def test_what_is_no_option_is_named(tmp_path, read) -> None:
    write_gptq(tmp_path, np.random.default_rng(1), 64, 16, 32, version=2)
    with pytest.raises(TypeError, match=r"expected an option of on_unsupported, .*, gguf_names, got 'rule'"):
        read(tmp_path, rule="word")
    with pytest.raises(TypeError, match="options: expected ReadOptions, got 'skip'"):
        read(tmp_path, "skip")


def test_a_wrong_option_leaves_the_model_alone(tmp_path) -> None:
    with pytest.raises(ValueError, match="gguf_names: expected 'gguf' or 'hf', got 'llama'"):
        load_quantized(nn.Linear(8, 8), tmp_path, gguf_names="llama")


def test_the_command_line_offers_the_values_of_the_options() -> None:
    shown = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "200"}).output
    for values in ("error|dequantize|skip", "gguf|hf", "word|masked|unmasked"):
        assert values in shown
