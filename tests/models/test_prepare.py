"""Tests which threads `prepare` uses to compile. Before torch 2.15, PyTorch's own kernels are not thread-safe."""

import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from tests.support.linear_layers import layer_of
from torch_marlin_metal import MarlinExperts, prepare, quantize_weight
from torch_marlin_metal.layers import ExpertWeights
from torch_marlin_metal.layers.experts import silu_gate
from torch_marlin_metal.models import prepare as module

WAIT = 20.0  # seconds within which two tasks that may run at once must meet


@pytest.fixture
def model(mps) -> nn.Module:
    """Returns a model with two different mixtures, of two products each, and two different linear layers."""

    def stack(K: int, N: int) -> ExpertWeights:
        return ExpertWeights.from_packed([[quantize_weight(torch.randn(N, K), "uint4", 32)]])

    mixtures = [MarlinExperts(stack(K, 64), stack(32, K), silu_gate, 1) for K in (32, 64)]
    return nn.ModuleList([*mixtures, layer_of("uint4", mps), layer_of("uint4b8", mps)]).to(mps)


@pytest.mark.parametrize("locks", [False, True])
def test_mixtures_take_turns_until_pytorch_locks_its_kernels(model, monkeypatch, locks) -> None:
    running, overlaps, ended = threading.Lock(), [], []
    together = {kind: threading.Barrier(2, timeout=WAIT) for kind in ("mixture", "product")}

    def task(kind: str, *arguments: object) -> None:
        if locks or kind == "product":
            together[kind].wait()  # raises an exception if no other task of this kind runs
        alone = running.acquire(blocking=False)
        overlaps.append((kind, not alone))
        time.sleep(0.01)
        if alone:
            running.release()
        ended.append(kind)

    monkeypatch.setattr(module, "TORCH_LOCKS_ITS_KERNELS", locks)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(module, "_run_without_experts", partial(task, "mixture"))
    monkeypatch.setattr(module, "_compile", partial(task, "product"))
    assert prepare(model, [1], progress=False) == 6
    assert ended == ["mixture"] * 4 + ["product"] * 2, "the products must wait for PyTorch's kernels"
    if not locks:
        assert ("mixture", True) not in overlaps
