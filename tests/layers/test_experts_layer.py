"""MarlinExperts stacks packed weights exactly, gives the same results as its experts, and preserves its state_dict."""

import re
import weakref
from dataclasses import replace

import pytest
import torch

from tests.support.models import same
from torch_marlin_metal import MarlinExperts, PackedWeight, gemm, quantize_weight
from torch_marlin_metal.layers import ExpertWeights
from torch_marlin_metal.layers.experts import StackError, silu_gate

E, H, I = 3, 64, 40  # noqa: E741


def packed(N: int, K: int, seed: int, weight_format: str = "uint4", bias: bool = False) -> PackedWeight:
    torch.manual_seed(seed)
    weight = quantize_weight(torch.randn(N, K), weight_format, None if "fp4" in weight_format else 16)
    return replace(weight, bias=torch.randn(N)) if bias else weight


def parts_of(weight_format: str, count: int = 2, bias: bool = False) -> list[list[PackedWeight]]:
    return [[packed(I, H, 10 * e + part, weight_format, bias) for part in range(count)] for e in range(E)]


def with_perm(parts: list[PackedWeight]) -> list[PackedWeight]:
    perm = torch.randperm(H, dtype=torch.int32)
    return [replace(part, perm=perm) for part in parts]


def layer(weight_format: str = "uint4") -> MarlinExperts:
    down = [[packed(H, I, 100 + e, weight_format, bias=True)] for e in range(E)]
    return MarlinExperts(ExpertWeights.from_packed(parts_of(weight_format)), ExpertWeights.from_packed(down), silu_gate)


@pytest.mark.parametrize("weight_format", ["uint4b8", "uint4", "uint4_bias", "float4_e2m1", "nvfp4", "mxfp4", "lut4"])
def test_parts_come_back_as_they_were(weight_format):
    if weight_format == "mxfp4":
        parts = [[packed(I, H, e, "mxfp4")] for e in range(E)]
    else:
        parts = parts_of(weight_format, bias=True)
    parts[1] = with_perm(parts[1])
    stack = ExpertWeights.from_packed(parts)
    for index, own in enumerate(parts):
        for number, part in enumerate(own):
            got = stack.to_packed(index, number if len(own) > 1 else None)
            in_order = torch.arange(H, dtype=torch.int32)
            expected = replace(part, perm=in_order) if part.perm is None else part
            assert same(got.tensors(), expected.tensors())
        whole = torch.cat([part.dequantize() for part in own], dim=1)
        assert torch.equal(stack.dequantize()[index], whole.T)


@pytest.mark.parametrize("weight_format", ["uint4", "nvfp4"])
def test_it_computes_what_the_experts_do_one_by_one(weight_format, device):
    experts = layer(weight_format).to(device)
    a, weights = torch.randn(4, H, device=device), torch.rand(4, 2, device=device)
    ids = torch.tensor([[0, 2], [1, 0], [2, E], [-1, 1]])
    got = experts(a, ids.to(device), weights)
    expected = torch.zeros(4, H, device=device)
    for t in range(4):
        for s in range(2):
            e = int(ids[t, s])
            if 0 <= e < E:
                hidden = silu_gate(gemm(a[t : t + 1], experts.gate_up.to_packed(e)))
                expected[t] += weights[t, s] * gemm(hidden, experts.down.to_packed(e))[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_state_dict_loads_into_an_empty_layer_bit_for_bit():
    experts = layer()
    state = experts.state_dict()
    with torch.device("meta"):
        empty = MarlinExperts(
            ExpertWeights(E, H, [I, I], weight_format="uint4", group_size=16),
            ExpertWeights(E, I, [H], True, weight_format="uint4", group_size=16),
            silu_gate,
        )
    empty.load_state_dict(state, assign=True)
    assert same(empty.state_dict(), state)
    a, ids, weights = torch.randn(2, H), torch.tensor([[0, 1], [2, 2]]), torch.rand(2, 2)
    assert torch.equal(empty(a, ids, weights), experts(a, ids, weights))


def test_a_state_dict_with_a_bad_scale_of_one_expert_is_refused():
    experts = layer()
    state = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    state["down.scales"][2, 0, 0] = torch.nan
    with pytest.raises(RuntimeError, match=re.escape("down.scales: expected finite values")):
        experts.load_state_dict(state)


def test_dtypes_of_the_weight_stay():
    experts = layer().half()
    assert experts.down.bias.dtype == torch.float16
    assert torch.equal(experts.down.scales, layer().down.scales)
    assert experts.gate_up.b_packed.dtype == torch.int32


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([packed(I, H, 1), packed(I + 8, H, 2)], "the sizes of the experts differ"),
        ([packed(I, H, 1, "uint4b8")] * 2, "sizes, weight formats or group sizes differ"),
        ([packed(I, H, 1, bias=True)] * 2, "the dtypes of bias differ"),
        ([*with_perm([packed(I, H, 1)]), *with_perm([packed(I, H, 2)])], "the act-orders of gate and up differ"),
    ],
)
def test_weights_that_cannot_be_stacked_are_refused(other, message):
    with pytest.raises(ValueError, match=f"ExpertWeights: weights: {message}"):
        ExpertWeights.from_packed([parts_of("uint4")[0], other])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "expected at least one expert, got 0"),
        ([()], "expected at least one part of expert 0, got none"),
        (iter([]), r"expected a sequence, or their number \(experts\); got a list_iterator"),
        (
            [packed(I, H, e) for e in range(E)],
            "expected a list of PackedWeight for expert 0, got PackedWeight",
        ),
        ([[layer().gate_up]], r"expected a list of PackedWeight for expert 0, got \['ExpertWeights'\]"),
        (layer().gate_up, "expected a sequence with the parts of each expert, got ExpertWeights"),
    ],
)
def test_a_stack_of_nothing_is_refused(weights, message):
    with pytest.raises(StackError, match=f"^ExpertWeights: weights: {message}$"):
        ExpertWeights.from_packed(weights)


def test_an_expert_is_freed_before_the_next_one_is_read():
    read: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def expert(index: int) -> list[PackedWeight]:
        alive.append(sum(words() is not None for words in read))
        parts = [packed(I, H, 10 * index + part) for part in range(2)]
        read.extend(weakref.ref(part.b_packed) for part in parts)
        return parts

    ExpertWeights.from_packed(map(expert, range(E)), experts=E)
    assert alive == [0] * E


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="ExpertWeights: expected at least one expert"):
        ExpertWeights(0, H, [I])
    down = ExpertWeights(E + 1, I, [H])
    with pytest.raises(ValueError, match="MarlinExperts: down: expected 3 experts as in gate_up, got 4"):
        MarlinExperts(ExpertWeights(E, H, [I, I]), down, silu_gate)


def test_sizes_that_do_not_agree_are_named():
    gate_up = ExpertWeights.from_packed(parts_of("uint4"))
    down = ExpertWeights.from_packed([[packed(H, I + 8, e)] for e in range(E)])
    message = f"down: expected in_features {I}, half the {2 * I} columns of gate_up, got {I + 8}"
    with pytest.raises(ValueError, match=f"MarlinExperts: {message}"):
        MarlinExperts(gate_up, down, silu_gate)
    experts = MarlinExperts(gate_up, down, lambda both: both[..., :I].relu())
    message = rf"activation: expected \[..., {I + 8}\] of {2 * I} columns of gate_up, .* got \[2, 1, {I}\]"
    with pytest.raises(ValueError, match=f"MarlinExperts: {message}"):
        experts(torch.zeros(2, H), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))


def test_a_batch_of_sequences_is_named():
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=rf"MarlinExperts: hidden_states: expected \[T, H\] with H = {H}, got \[1, 2, 64\]"
    ):
        layer()(torch.zeros(1, 2, H), ids, torch.ones(2, 1))


@pytest.mark.parametrize(
    ("index", "part", "message"),
    [
        (0, 5, "part: expected 0 to 0, got 5"),
        (0, -1, "part: expected 0 to 0, got -1"),
        (E, None, "index: expected 0 to 2, got 3"),
    ],
)
def test_experts_and_parts_that_do_not_exist_are_named(index, part, message):
    with pytest.raises(IndexError, match=f"ExpertWeights: to_packed: {message}"):
        layer().down.to_packed(index, part)
