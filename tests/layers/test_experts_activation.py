"""MarlinExperts computes recognized activations in one operator, and calls all other activations as they are."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_marlin_metal import MarlinExperts, quantize_weight
from torch_marlin_metal.layers import ExpertWeights
from torch_marlin_metal.layers.activation import KnownActivation, find_known
from torch_marlin_metal.layers.experts import silu_gate

EXPERTS, HIDDEN, INNER, TOP_K = 3, 48, 64, 2


class Clamped(nn.Module):
    """The activation of gpt-oss with other constants: gate and up alternate and are clamped."""

    def __init__(self, limit: float = 5.0, alpha: float = 1.5) -> None:
        super().__init__()
        self.limit, self.alpha = limit, alpha

    def halves(self, both: Tensor) -> tuple[Tensor, Tensor]:
        return both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)

    def forward(self, both: Tensor) -> Tensor:
        gate, up = self.halves(both)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))

    def without_one(self, both: Tensor) -> Tensor:
        gate, up = self.halves(both)
        return functional.silu(gate) * up

    def with_dropout(self, both: Tensor) -> Tensor:
        return functional.dropout(silu_gate(both), 0.1, self.training)


class Silu(nn.Module):
    def forward(self, both: Tensor) -> Tensor:
        return silu_gate(both)


def gate_of(function, both: Tensor, is_interleaved: bool = False, is_swapped: bool = False) -> Tensor:
    one, two = (both[..., ::2], both[..., 1::2]) if is_interleaved else both.chunk(2, -1)
    return function(two) * one if is_swapped else function(one) * two


GELU_TANH = partial(functional.gelu, approximate="tanh")
KNOWN = {
    "silu": (silu_gate, KnownActivation("silu")),
    "gelu": (partial(gate_of, functional.gelu), KnownActivation("gelu")),
    "gelu_tanh": (partial(gate_of, GELU_TANH, is_swapped=True), KnownActivation("gelu_tanh", swapped=True)),
    "alternating": (partial(gate_of, functional.silu, is_interleaved=True), KnownActivation("silu", interleaved=True)),
    "clamped": (Clamped().forward, KnownActivation("clamped_silu", interleaved=True, limit=5.0, alpha=1.5)),
    "limited": (Clamped().without_one, KnownActivation("limited_silu", interleaved=True, limit=5.0)),
    "clamped by an int": (Clamped(3).forward, KnownActivation("clamped_silu", interleaved=True, limit=3.0, alpha=1.5)),
    "equal numbers": (Clamped(2, 2).forward, KnownActivation("clamped_silu", interleaved=True, limit=2.0, alpha=2.0)),
}
UNKNOWN = {
    "no gate": lambda both: both[..., : both.shape[-1] // 2],
    "relu": partial(gate_of, functional.relu),
    "quick gelu": partial(gate_of, lambda gate: gate * torch.sigmoid(1.702 * gate)),
    "a high limit": lambda both: silu_gate(both.clamp(max=10_000.0)),
    "a factor": lambda both: 1.001 * silu_gate(both),
    "a result in fp32": lambda both: silu_gate(both.float()),
    "another function in 16 bits": lambda both: (
        both.chunk(2, -1)[0] if both.dtype != torch.float32 else silu_gate(both)
    ),
    "a limit in fp16": lambda both: silu_gate(both.clamp(-1000, 1000) if both.dtype == torch.float16 else both),
    "a limit of gate in bf16": lambda both: silu_gate(
        torch.cat([(gate := both.chunk(2, -1))[0].clamp(max=9000), gate[1]], -1)
        if both.dtype == torch.bfloat16
        else both
    ),
    "an error": lambda both: both.missing,
    "dropout in training": Clamped().eval().with_dropout,
    "a module with dropout": nn.Sequential(Silu(), nn.Dropout(0.1)).eval(),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("columns", [16, 2 * INNER])
def test_known_activations_are_found(name, columns):
    activation, expected = KNOWN[name]
    with torch.device("meta"):  # as when transformers creates a model
        assert find_known(activation, columns) == expected


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_activations_are_not_taken_for_known_ones(name):
    assert find_known(UNKNOWN[name], 2 * INNER) is None


def test_the_search_leaves_the_generator_and_the_mode_of_a_module_alone():
    before, owner = torch.get_rng_state(), Clamped().eval()
    find_known(owner.forward, 16)
    assert torch.equal(torch.get_rng_state(), before) and not owner.training


def stack(parts: int, columns: int, rows: int) -> ExpertWeights:
    torch.manual_seed(columns)
    weights = [
        [quantize_weight(torch.randn(columns, rows), "uint4b8", 16) for _ in range(parts)] for _ in range(EXPERTS)
    ]
    return ExpertWeights.from_packed(weights)


def layer(activation) -> MarlinExperts:
    return MarlinExperts(stack(2, INNER, HIDDEN), stack(1, HIDDEN, INNER), activation)


def with_own_activation(experts: MarlinExperts) -> MarlinExperts:
    """Returns a copy that calls the activation function that it was given."""
    own = copy.deepcopy(experts)
    own._known = None
    return own


def arguments(tokens: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    ids = (torch.arange(TOP_K * tokens) % EXPERTS).view(tokens, TOP_K)
    return 3 * torch.randn(tokens, HIDDEN, device=device), ids.to(device), torch.rand(tokens, TOP_K, device=device)


@pytest.mark.parametrize("name", KNOWN)
def test_results_and_gradients_are_those_of_the_activation(name, device):
    experts = layer(KNOWN[name][0]).to(device)
    assert experts._known is not None
    a, ids, weights = arguments(5, device)
    results = []
    for one in (experts, with_own_activation(experts)):
        leaves = a.clone().requires_grad_(), weights.clone().requires_grad_()
        y = one(leaves[0], ids, leaves[1])
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("name", ["silu", "clamped", "limited"])
def test_compiled_copied_and_pickled_layers_compute_the_same(name):
    experts = layer(KNOWN[name][0])
    a, ids, weights = arguments(3)
    expected = experts(a, ids, weights)
    with torch.no_grad():
        compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(compiled(a, ids, weights), expected)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert other._known == experts._known and torch.equal(other(a, ids, weights), expected)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, both: Tensor) -> Tensor:
        return functional.dropout(silu_gate(both), 1.0, self.training) * self.factor


def test_a_module_that_is_the_activation_is_a_part_of_the_layer() -> None:
    experts = layer(Scaled())
    assert "activation.factor" in experts.state_dict()
    a, ids, weights = arguments(3)
    experts.train()
    assert not experts(a, ids, weights).any()
    expected = layer(silu_gate)(a, ids, weights)
    torch.testing.assert_close(experts.eval()(a, ids, weights), 2 * expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "kernels"),
    [
        (1, ["moe_gemv_gated", "moe_gemv_reduce"]),
        (512, ["moe_sort", "moe_fused", "gated_activation", "moe_sort", "moe_fused", "moe_reduce"]),
    ],
)
@pytest.mark.parametrize("name", ["silu", "clamped", pytest.param("limited", marks=pytest.mark.whole)])
def test_a_forward_dispatches_two_kernels_or_six_and_does_not_wait(name, tokens, kernels, mps):
    import softmetal

    experts = layer(KNOWN[name][0]).to(mps)
    a, ids, weights = arguments(tokens, mps)
    experts(a, ids, weights)  # compiles
    torch.mps.synchronize()
    softmetal.faults()  # clears the list of dispatches
    waits = softmetal.stream_counts().waits
    experts(a, ids, weights)
    assert softmetal.stream_counts().waits == waits
    assert [re.split("_uint4b8|_float32", record.kernel)[0] for record in softmetal.counters()] == kernels
