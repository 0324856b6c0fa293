"""Runs the mixture demo on a text that a model learns in a few steps. Packed experts must predict the text as well."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import MixtralForCausalLM

from torch_marlin_metal import MarlinExperts, MarlinLinear

STEPS = 80


@pytest.fixture
def demo(monkeypatch):
    from examples import mixture

    clock = itertools.count(0, 1 / STEPS)  # a fake clock gives the same steps on any machine
    monkeypatch.setattr(mixture, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for name, value in {"PROMPT": "abc", "WINDOW": 32, "BATCH": 8, "FORMATS": (("uint4b8", 32), ("nvfp4", 16))}.items():
        monkeypatch.setattr(mixture, name, value)
    return mixture


@pytest.fixture
def trained(demo):
    text = torch.arange(3000) % 7  # each letter determines the next
    test = text[: 33 * 4].view(4, 33)
    model = demo.make_model(7, width=64, layers=2, experts=4)
    losses = demo.train(model, text, 1, Console(quiet=True))
    return model, losses, test


def test_packed_experts_keep_what_was_learnt(demo, trained) -> None:
    model, losses, test = trained
    assert len(losses) == STEPS
    assert losses[-1] < 0.1 * losses[0]
    results, files = demo.compare(model, test, list("abcdefg"), 12)
    dense = results[0]
    learnt = losses[0] - dense.loss
    for result, size in zip(results[1:], files[1:], strict=True):
        assert abs(result.loss - dense.loss) < 0.01 * learnt
        assert result.experts_bytes < dense.experts_bytes / 6
        assert size < 0.4 * files[0]
        assert 0.5 < demo.same_choice(dense, result) <= 1
    assert {result.text for result in results} == {"abcdefgabcdefga"}
    assert demo.table_of(results, files).row_count == 3


def test_experts_are_packed_and_routers_stay(demo, monkeypatch) -> None:
    dense = demo.make_model(7, width=64, layers=2, experts=4).eval()
    model, report = demo.pack(dense, "uint4b8", 32)
    for layer, old in zip(model.model.layers, dense.model.layers, strict=True):
        assert isinstance(layer.mlp.experts, MarlinExperts)
        assert isinstance(layer.self_attn.q_proj, MarlinLinear)
        assert type(layer.mlp.gate.weight) is nn.Parameter
        assert torch.equal(layer.mlp.gate.weight, old.mlp.gate.weight)
        assert not isinstance(old.mlp.experts, MarlinExperts)
    assert type(model.lm_head) is nn.Linear
    assert sum(layer.name.endswith(".experts") for layer in report.converted) == 2
    test = torch.arange(66).view(2, 33) % 7
    assert demo.check_reload(model, test) > 0

    def damaged(folder: str) -> nn.Module:
        again = MixtralForCausalLM.from_pretrained(folder)
        again.model.layers[1].mlp.experts.down.b_packed[3, 0, 0] ^= 1
        return again

    monkeypatch.setattr(demo, "MixtralForCausalLM", SimpleNamespace(from_pretrained=damaged))
    with pytest.raises(SystemExit, match="the reloaded model has other tensors"):
        demo.check_reload(model, test)


def test_floats_in_the_place_of_packed_experts_are_an_error(demo, monkeypatch) -> None:
    original = demo.tmm.quantize_model
    monkeypatch.setattr(demo.tmm, "quantize_model", lambda *args, **kw: original(*args, exclude="*.experts", **kw))
    with pytest.raises(SystemExit, match="experts are not packed"), pytest.warns(UserWarning, match="only"):
        demo.pack(demo.make_model(7, width=64, layers=1, experts=4), "uint4b8", 32)
