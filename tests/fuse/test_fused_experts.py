"""Counts the dispatches on mps of a block of experts with a fused activation."""

import pytest
import torch

from torch_marlin_metal import ExpertWeights, MarlinExperts, quantize_weight
from torch_marlin_metal.fuse.experts import fused_activation
from torch_marlin_metal.layers.experts import silu_gate

EXPERTS, HIDDEN, INNER = 3, 64, 48


def experts_of(parts: int, columns: int, rows: int) -> ExpertWeights:
    torch.manual_seed(columns)
    weights = [
        [quantize_weight(torch.randn(columns, rows), "uint4b8", 16) for _ in range(parts)] for _ in range(EXPERTS)
    ]
    return ExpertWeights.from_packed(weights)


@pytest.mark.parametrize(("tokens", "dispatches"), [(1, 4), (512, 6)])
def test_a_block_with_a_fused_activation_dispatches_one_kernel_more_than_its_products(tokens, dispatches, mps):
    import softmetal

    gate_up, down = experts_of(2, INNER, HIDDEN), experts_of(1, HIDDEN, INNER)
    activation = fused_activation(MarlinExperts(gate_up, down, silu_gate))
    assert activation is not None
    block = MarlinExperts(gate_up, down, activation).to(mps)
    a, weights = torch.randn(tokens, HIDDEN, device=mps), torch.rand(tokens, 1, device=mps)
    ids = (torch.arange(tokens) % EXPERTS)[:, None].to(mps)
    block(a, ids, weights)  # compiles
    torch.mps.synchronize()
    softmetal.faults()  # empties the list of dispatches
    waits = softmetal.stream_counts().waits
    block(a, ids, weights)
    assert softmetal.stream_counts().waits == waits
    kernels = [record.kernel for record in softmetal.counters()]
    assert len(kernels) == dispatches, kernels
    assert sum("gated" in kernel for kernel in kernels) == 1, kernels
