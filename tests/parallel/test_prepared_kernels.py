"""`prepare` compiles the kernels of split layers: products that are summed over processes are in fp32."""

import torch
from torch import nn

from tests.support.linear_layers import layer_of
from torch_marlin_metal import MarlinExperts, prepare, quantize_weight
from torch_marlin_metal.layers import ExpertWeights
from torch_marlin_metal.layers.experts import silu_gate
from torch_marlin_metal.models import prepare as module
from torch_marlin_metal.parallel.styles import ColumnPart, ExpertPart, RowPart


def test_products_that_are_summed_are_prepared_in_fp32(mps, monkeypatch) -> None:
    columns, rows = layer_of("uint4", mps), layer_of("uint4b8", mps)
    columns.__class__, rows.__class__ = ColumnPart, RowPart
    weights = [[quantize_weight(torch.randn(n, k), "uint4", 32) for n, k in ((64, 32), (64, 32), (32, 64))]]
    stacks = ExpertWeights.from_packed([weights[0][:2]]), ExpertWeights.from_packed([weights[0][2:]])
    experts = MarlinExperts(*stacks, silu_gate, 2).to(mps)
    experts.__class__ = ExpertPart
    seen = {}
    monkeypatch.setattr(module, "_compile", lambda layer, M, dtype: seen.setdefault(layer, dtype))

    def run(experts: MarlinExperts, M: int, top_k: int, dtype: torch.dtype, is_down: bool) -> None:
        seen[experts.down if is_down else experts.gate_up] = dtype

    monkeypatch.setattr(module, "_run_without_experts", run)
    prepare(nn.ModuleList([columns, rows, experts]), [1], dtype=torch.float16, progress=False)
    half, full = torch.float16, torch.float32
    assert seen == {columns: half, rows: full, experts.gate_up: half, experts.down: full}
