"""A `PackedWeight` is one argument of the operators, replaces aliases, and prints on one line."""

import inspect
import operator
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_marlin_metal as tmm
from torch_marlin_metal.formats import ALIASES


@pytest.mark.parametrize("weight_format", tmm.WEIGHT_FORMATS)
def test_a_weight_multiplies_with_its_scales_table_and_bias(weight_format) -> None:
    torch.manual_seed(0)
    options = {"lut": torch.linspace(-1, 1, 16)} if weight_format == "lut4" else {}
    weight = tmm.quantize_weight(torch.randn(24, 128), weight_format, **options)
    weight.bias = torch.randn(24)
    a = torch.randn(2, 3, 128)
    exact = a.double() @ weight.dequantize().double() + weight.bias.double()
    torch.testing.assert_close(tmm.gemm(a, weight).double(), exact, rtol=1e-5, atol=1e-4)
    other = torch.randn(24)
    assert torch.equal(tmm.gemm(a, weight, other), tmm.gemm(a, replace(weight, bias=other)))
    assert not torch.equal(tmm.gemm(a, weight, other), tmm.gemm(a, weight))


@pytest.mark.parametrize("weight_format", ["uint4", "nvfp4", "lut4"])
@pytest.mark.parametrize("with_perm", [False, True])
def test_the_functions_compute_what_the_operators_compute_from_all_tensors(weight_format, with_perm) -> None:
    torch.manual_seed(0)
    ops, E, K, N, ids = torch.ops.torch_marlin_metal, 3, 128, 24, torch.tensor([[0, 2], [1, -1]])
    options = {"lut": torch.linspace(-1, 1, 16)} if weight_format == "lut4" else {}
    parts = [tmm.quantize_weight(torch.randn(N, K), weight_format, **options) for _ in range(E)]
    for part in parts:
        part.bias = torch.randn(N)
        part.global_scale = torch.rand(N) if weight_format == "nvfp4" else None
        part.perm = torch.randperm(K).int() if with_perm else None
    one = parts[0]
    stacked = {name: torch.stack([part.tensors()[name] for part in parts]) for name in one.tensors() if name != "lut"}
    stack = replace(one, **stacked)
    assert (stack.K, stack.N) == (K, N)
    a, rows = torch.randn(2, K), torch.randn(2, N)

    def loose(weight: tmm.PackedWeight, **more: Any) -> dict[str, Any]:
        return {**weight.tensors(), "weight_format": weight_format, "group_size": weight.group_size, **more}

    def no_bias(weight: tmm.PackedWeight, **more: Any) -> dict[str, Any]:
        return loose(replace(weight, bias=None), **more)

    for found, expected in (
        (tmm.gemm(a, one), ops.gemm(a, **loose(one))),
        (tmm.gemm_transposed(rows, one), ops.gemm_transposed(rows, **no_bias(one))),
        (one.dequantize(torch.float16), ops.dequantize(**no_bias(one))),
        (one.dequantize(), ops.dequantize(**no_bias(one), dtype=torch.float32)),
        (tmm.embedding(ids[:1], one, torch.bfloat16), ops.embedding(ids[:1], **no_bias(one), dtype=torch.bfloat16)),
        (
            tmm.moe_gemm(a, stack, ids, row_weights=rows[:, :2]),
            ops.moe_gemm(a, expert_ids=ids, row_weights=rows[:, :2], **loose(stack)),
        ),
        (
            tmm.moe_gemm(a, stack, ids, torch.ones(E, N), reduce=True),
            ops.moe_gemm(a, expert_ids=ids, reduce=True, **loose(stack, bias=torch.ones(E, N))),
        ),
        (
            tmm.ops.moe_gemm_gated(a, stack, ids, activation="gelu", interleaved=True),
            ops.moe_gemm_gated(a, expert_ids=ids, activation="gelu", interleaved=True, **loose(stack)),
        ),
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["gemm", "gemm_transposed", "moe_gemm", "ops.moe_gemm_gated", "embedding"])
def test_the_functions_refuse_a_plain_tensor_as_a_weight(name) -> None:
    tensors = {"a": torch.ones(1, 64), "ids": torch.ones(1), "expert_ids": torch.zeros(1, 1)}
    function = operator.attrgetter(name)(tmm)
    name = function.__name__
    taken = {key: tensors[key] for key in inspect.signature(function).parameters if key in tensors}
    message = (
        f"{name}: weight: expected a PackedWeight, got Tensor; torch.ops.torch_marlin_metal.{name} takes the tensors"
    )
    with pytest.raises(TypeError, match=message):
        function(weight=torch.ones(8, 64), **taken)


def test_aliases_are_names_of_other_projects() -> None:
    vllm = {
        "u4b8": "uint4b8",
        "u4": "uint4",
        "fp4": "float4_e2m1",
        "float4_e2m1f": "float4_e2m1",
        "u8b128": "uint8b128",
    }
    pytorch = {"float8_e4m3fn": "float8_e4m3", "fp8": "float8_e4m3"}
    assert (vllm | pytorch | {"nf4": "lut4", "q4_k": "uint4_bias"}).items() <= ALIASES.items()


@pytest.mark.parametrize("alias", ALIASES)
def test_a_weight_replaces_an_alias_and_minus_one(alias) -> None:
    weight = tmm.quantize_weight(torch.randn(24, 64), alias, -1)
    given = {name: value for name, value in weight.tensors().items() if name not in ("b_packed", "scales")}
    made = tmm.PackedWeight(weight.b_packed, weight.scales, alias, -1, **given)
    for one in (weight, made):
        assert (one.weight_format, one.group_size) == (ALIASES[alias], 64)
    assert torch.equal(made.validate().dequantize(), weight.dequantize())


def test_a_weight_prints_on_one_line() -> None:
    weight = tmm.quantize_weight(torch.randn(24, 128), "uint4", 32)
    assert repr(weight) == "PackedWeight(K=128, N=24, uint4, group_size=32, scales=float16, zeros, device=cpu)"
    weight.name = "up"
    assert repr(weight).startswith("PackedWeight('up', K=128")
