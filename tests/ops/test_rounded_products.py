"""`gemm(variant="rounded")` on the CPU rounds weights to bf16, as training with `round_weights` does."""

import copy

import numpy as np
import pytest
import torch

import torch_marlin_metal as tmm
from tests.support import reference
from torch_marlin_metal.integrations.peft import prepare_for_training

OPS = torch.ops.torch_marlin_metal

K, N = 1024, 2200  # the last strip of 32 columns is narrow
ROUNDED_ROWS = 128
DTYPE = torch.bfloat16
IS_FAST = tmm.cpu_capability().isa == "amx" or "avx512_bf16" in tmm.cpu_capability().features


def activations(rows: int) -> torch.Tensor:
    return reference.random(rows, K, dtype=DTYPE)


@pytest.mark.parametrize(
    "variant_of_format",
    ["uint4", "uint4_bias", "nvfp4", "mxfp4", "uint6", "uint8b128", "float8_e4m3", "lut4", "lut4 act-order bias"],
)
def test_values_are_within_the_documented_bound(variant_of_format):
    name, *extras = variant_of_format.split()
    options = {"global_scale_shape": (-1,)} if name == "nvfp4" else {}
    weight = reference.make_weight(name, K, N, 64, **options)
    a, exact = activations(ROUNDED_ROWS), weight.exact
    bias = None
    if extras:
        perm = np.random.default_rng(0).permutation(K).astype(np.int32)
        weight.arguments["perm"] = torch.from_numpy(perm)
        exact = np.empty_like(weight.exact)
        exact[perm] = weight.exact
        bias = torch.linspace(-4, 4, N).to(DTYPE)
    call = {"bias": bias, **weight.arguments}
    got = reference.to_numpy(OPS.gemm(a, weight.b_packed, weight.scales, variant="rounded", **call))
    rows = reference.to_numpy(a)
    y, magnitude = rows @ exact, np.abs(rows) @ np.abs(exact)
    if bias is not None:
        y, magnitude = y + reference.to_numpy(bias), magnitude + np.abs(reference.to_numpy(bias))
    unit = reference.UNIT_ROUNDOFF[DTYPE]
    bound = unit * np.abs(y) + reference.TINY[DTYPE] + (16 * 2.0**-24 + unit * (1 + unit)) * magnitude
    assert (np.abs(got - y) <= bound).all()


@pytest.mark.skipif(not IS_FAST, reason="this CPU has no fast products of bf16, so nothing is rounded")
def test_the_option_for_decoded_weights_rounds_products_of_many_rows(monkeypatch):
    weight = reference.make_weight("uint4b8", K, N, 32)  # takes 4.3 MiB in bf16

    def product(rows: int, variant: str) -> torch.Tensor:
        return OPS.gemm(activations(rows), weight.b_packed, weight.scales, variant=variant, **weight.arguments)

    rounded, exact, few = product(128, "rounded"), product(128, "auto"), product(127, "auto")
    assert not torch.equal(rounded, exact)
    for megabytes, rows, expected in (("5", 128, rounded), ("5", 127, few), ("4", 128, exact), ("0", 128, exact)):
        monkeypatch.setenv("TORCH_MARLIN_METAL_DECODE_MB", megabytes)
        assert torch.equal(product(rows, "auto"), expected), (megabytes, rows)
    for name in ("fused", "two_pass"):  # the CPU ignores names of kernels
        assert torch.equal(product(128, name), exact)
    monkeypatch.setenv("TORCH_MARLIN_METAL_DECODE_MB", "much")
    with pytest.raises(ValueError, match="TORCH_MARLIN_METAL_DECODE_MB: expected MiB as a whole number"):
        product(128, "auto")


@pytest.mark.skipif(not IS_FAST, reason="this CPU has no fast products of bf16, so nothing is rounded")
def test_training_rounds_the_weights_of_tables_and_evaluation_does_not():
    torch.manual_seed(0)
    linear = torch.nn.Linear(K, 64).to(DTYPE)
    layers = torch.nn.ModuleDict(
        {name: tmm.MarlinLinear.from_linear(linear, name, 64) for name in ("nf4", "uint4b8")}
    ).train()
    exact = {name: layer(activations(ROUNDED_ROWS)) for name, layer in layers.items()}
    kept = copy.deepcopy(layers)
    prepare_for_training(layers, gradient_checkpointing=False, round_weights=True)
    few, many = activations(ROUNDED_ROWS - 1), activations(ROUNDED_ROWS)
    table = layers["nf4"]
    rounded = torch.nn.functional.linear(many, table.dequantize(DTYPE), table.bias)
    torch.testing.assert_close(table(many), rounded, rtol=2**-7, atol=1e-3)
    assert not torch.equal(table(many), exact["nf4"])
    assert torch.equal(table(few), kept["nf4"](few))
    assert torch.equal(layers["uint4b8"](many), exact["uint4b8"])
    assert torch.equal(table.eval()(many), exact["nf4"])
    wide = many.float()
    assert torch.equal(table.train()(wide), kept["nf4"](wide))
    prepare_for_training(layers, gradient_checkpointing=False)
    assert torch.equal(table(many), exact["nf4"])
