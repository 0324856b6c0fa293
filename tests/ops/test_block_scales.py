"""E4M3 weights with a scale per block of 128 x 128: all operators agree with fp64, and conversions keep the scales."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torch_marlin_metal as tmm
from tests.support import experts as reference_experts
from tests.support import reference
from tests.support.experts import make_experts, run
from tests.support.reference import random
from torch_marlin_metal.parallel import join_columns, join_rows, reorder_columns, split_columns, split_rows

OPS = torch.ops.torch_marlin_metal
FORMAT, GROUP = "float8_e4m3", 128
ROWS = (1, 4, 8, 32, 200)
K, N = 328, 384  # the last group is short


def made(K: int = K, N: int = N, scales_dtype: torch.dtype = torch.float32, seed: int = 0) -> reference.Weight:
    return reference.make_weight(FORMAT, K, N, GROUP, scales_dtype=scales_dtype, seed=seed, block_scales=True)


def packed(K: int = K, N: int = N, seed: int = 0) -> tmm.PackedWeight:
    weight = made(K, N, seed=seed)
    return tmm.PackedWeight(weight.b_packed, weight.scales, FORMAT, GROUP).validate()


@pytest.mark.parametrize("dtype", reference.DTYPES)
@pytest.mark.parametrize("scales_dtype", reference.DTYPES)
def test_products_of_blocks(dtype, scales_dtype):
    weight = made(scales_dtype=scales_dtype)
    a, bias = random(max(ROWS), K, dtype=dtype), random(N, dtype=dtype, seed=1)
    exact, bound = reference.gemm(a, weight, bias)
    for M in ROWS:
        result = OPS.gemm(a[:M], weight.b_packed, weight.scales, **weight.arguments, bias=bias)
        reference.check_gemm(result, exact[:M], bound[:M])
        wide = OPS.gemm_fp32(a[:M], weight.b_packed, weight.scales, **weight.arguments, bias=bias)
        reference.check_gemm(wide.to(dtype), exact[:M], bound[:M])


@pytest.mark.parametrize(
    ("M", "dtype"), [(1, torch.bfloat16), (4, torch.float16), (8, torch.float32), (32, torch.float16)]
)
def test_products_of_blocks_on_mps(M, dtype, mps):
    weight = made(scales_dtype=(torch.float32, torch.bfloat16)[M % 8 // 4])
    a = random(M, K, dtype=dtype)
    exact, bound = reference.gemm(a, weight, raw_codes=True)
    held = weight.to(mps)
    reference.check_gemm(OPS.gemm(a.to(mps), held.b_packed, held.scales, **held.arguments), exact, bound)


@pytest.mark.parametrize("variant", ["single_stage", "striped", "rounded"])
def test_named_variants_on_mps(variant, mps):
    weight = made()
    a = random(40, K, dtype=torch.float16)
    exact, bound = reference.gemm(a, weight, raw_codes=True)
    if variant == "rounded":
        bound = bound + 2.0**-11 * (np.abs(reference.to_numpy(a)) @ weight.magnitude)
    held = weight.to(mps)
    result = OPS.gemm(a.to(mps), held.b_packed, held.scales, **held.arguments, variant=variant)
    reference.check_gemm(result, exact, bound)


def test_the_rounded_product_on_the_cpu():
    weight, a = made(1024, 2176), random(128, 1024, dtype=torch.bfloat16)
    rows = reference.to_numpy(a)
    exact, magnitude = rows @ weight.exact, np.abs(rows) @ weight.magnitude
    got = OPS.gemm(a, weight.b_packed, weight.scales, **weight.arguments, variant="rounded")
    reference.check_gemm(got, exact, 2.0**-8 * np.abs(exact) + (2.0**-8 + 2.0**-16 + 2.0**-20) * magnitude + 2.0**-126)


def test_decoding_gives_the_bits_of_expanded_scales(device):
    """The two forms hold the same numbers, so every decoded element is the same."""
    perm = torch.from_numpy(np.random.default_rng(0).permutation(K).astype(np.int32))
    weight = replace(packed(), perm=perm).to(device)
    wide = weight.expanded_scales()
    assert wide.validate().scales.shape == (3, N)
    assert not wide.has_block_scales
    assert torch.equal(weight.dequantize(), wide.dequantize())
    exact = np.empty((K, N))
    exact[perm] = made().exact
    assert np.abs(reference.to_numpy(weight.dequantize()) - exact).max() <= 2.0**-23 * np.abs(exact).max()
    ids = torch.tensor([[0, 127, 128], [383, 255, 256]], device=device)
    rows = [OPS.embedding(ids, **one.arguments(), dtype=torch.float32) for one in (weight, wide)]
    assert torch.equal(*rows)
    assert torch.equal(rows[0], weight.dequantize().T[ids])


@pytest.mark.parametrize("part_bytes", [1, 72 * 4 * N, 200 * 4 * N, 1 << 26])
def test_the_transposed_product_decodes_parts(part_bytes, device, monkeypatch):
    """A part ends at the border of a group, or inside a group."""
    weight, grad = made(), random(3, N)
    exact = reference.to_numpy(grad) @ weight.exact.T
    bound = 32 * 2.0**-24 * (np.abs(reference.to_numpy(grad)) @ weight.magnitude.T)
    monkeypatch.setenv("TORCH_MARLIN_METAL_GRADIENT_BYTES", str(part_bytes))
    held = weight.to(device)
    got = OPS.gemm_transposed(grad.to(device), held.b_packed, held.scales, **held.arguments)
    reference.check_gemm(got, exact, bound)


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_products_of_experts(tokens, device):
    experts = make_experts(FORMAT, 5, K, 256, GROUP, scales_dtype=torch.float32, block_scales=True)
    ids = torch.from_numpy(np.random.default_rng(tokens).integers(-1, 5, (tokens, 2)))
    a = random(tokens, K, dtype=reference.DTYPES[tokens % 3])
    exact, bound = reference_experts.moe_gemm(a, experts, ids, raw_codes=reference.sums_raw_codes(device))
    reference.check_gemm(run(a, experts, ids, device), exact, bound)


def test_the_gradient_of_experts():
    experts = make_experts(FORMAT, 3, K, 128, GROUP, block_scales=True)
    a, ids = random(4, K).requires_grad_(), torch.tensor([[0, 2], [1, -1], [2, 2], [0, 1]])
    OPS.moe_gemm(a, experts.b_packed, experts.scales, ids, **experts.arguments).sum().backward()
    exact = np.stack([sum(experts.weights[e].exact.sum(1) for e in row if e >= 0) for row in ids.tolist()])
    assert np.abs(reference.to_numpy(a.grad) - exact).max() <= 1e-5 * np.abs(exact).max()


def test_layers_keep_scales_of_blocks(tmp_path):
    weight = replace(packed(), name="up")
    layer = tmm.MarlinLinear.from_packed(weight)
    a = random(5, K).requires_grad_()
    layer(a).sum().backward()
    torch.testing.assert_close(a.grad, weight.dequantize().sum(1).expand(5, K), rtol=1e-5, atol=1e-4)
    options: dict[str, Any] = {"weight_format": FORMAT, "group_size": GROUP, "scale_dtype": torch.float32}
    other = tmm.MarlinLinear(K, N, False, block_scales=True, **options)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(a), layer(a))
    wide = tmm.MarlinLinear(K, N, False, **options)
    with pytest.raises(RuntimeError, match=re.escape("scales: expected shape [3, 384], got [3, 3]")):
        wide.load_state_dict(layer.state_dict())
    with pytest.raises(ValueError, match=re.escape("block_scales: expected float8_e4m3, group_size 128, a multiple")):
        tmm.MarlinLinear(K, 200, False, block_scales=True, **options)
    for target in ("native", "compressed-tensors"):
        path = tmp_path / target
        if target == "native":
            save_tree(layer, path)
        else:
            tmm.convert.export_checkpoint([weight], path, target)
        (back,) = tmm.convert.read_layers(path)
        assert torch.equal(back.scales, weight.scales), target
        assert torch.equal(back.b_packed, weight.b_packed)
    for target in ("gptq", "awq"):
        with pytest.raises(tmm.convert.UnsupportedFormat):
            tmm.convert.export_checkpoint([weight], tmp_path / target, target)
    embedding = tmm.MarlinEmbedding.from_packed(weight)
    assert torch.equal(embedding(torch.tensor([200])), weight.dequantize().T[[200]])


def save_tree(layer: nn.Module, path) -> None:
    """Writes a checkpoint of this package from a checkpoint of another format."""
    source = path.parent / "source"
    held = tmm.MarlinLinear.to_packed(layer)
    source.mkdir()
    codes = held.b_packed.t().contiguous().view(torch.float8_e4m3fn)
    save_file({"up.weight": codes, "up.weight_scale_inv": held.scales.t().contiguous()}, source / "model.safetensors")
    settings = '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    (source / "config.json").write_text(settings)
    (read,) = tmm.convert.read_layers(source)
    assert torch.equal(read.scales, held.scales)
    tmm.convert.write_checkpoint(tmm.convert.open_reader(source), path)


def test_parts_and_joined_weights_keep_blocks_that_are_whole():
    whole = packed(512, 512)
    for count, kept in ((2, True), (4, True), (8, False)):
        parts = split_columns(whole, count)
        assert {part.validate().has_block_scales for part in parts} == {kept}
        assert torch.equal(torch.cat([part.dequantize() for part in parts], -1), whole.dequantize())
        assert torch.equal(join_columns(parts).validate().dequantize(), whole.dequantize())
    swapped = reorder_columns(whole, torch.arange(512).roll(128))
    assert swapped.validate().has_block_scales
    assert torch.equal(swapped.dequantize(), whole.dequantize().roll(128, 1))
    assert torch.equal(reorder_columns(whole, torch.arange(512).roll(64)).dequantize(), whole.dequantize().roll(64, 1))
    for rows in (whole, packed(128, 256)):
        parts = split_rows(rows, 2)
        assert torch.equal(torch.cat([part.validate().dequantize() for part in parts]), rows.dequantize())
        assert torch.equal(join_rows(parts).validate().dequantize(), rows.dequantize())
    again = join_rows([packed(128, 256), packed(128, 256)]).validate()
    assert torch.equal(again.dequantize(), packed(128, 256).dequantize().repeat(2, 1))


@pytest.mark.parametrize("sizes", [(256, 128, 128), (256, 200, 64)])
def test_fused_projections_have_the_products_of_each(sizes):
    """If one projection's columns are no multiple of 128, each column of the fused weight gets its own scale."""
    model = nn.Module()
    for seed, (name, size) in enumerate(zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True)):
        weight = made(K, size, seed=seed) if size % 128 == 0 else None
        held = (
            tmm.quantize_weight(random(size, K), FORMAT, GROUP, scale_dtype=torch.float32)
            if weight is None
            else tmm.PackedWeight(weight.b_packed, weight.scales, FORMAT, GROUP)
        )
        model.add_module(name, tmm.MarlinLinear.from_packed(held))
    a = random(3, K)
    before = {name: module.to_packed().dequantize() for name, module in model.named_children()}
    expected = {name: module(a) for name, module in model.named_children()}
    assert len(tmm.fuse_projections(model).fused) == 1
    assert (model.q_proj.fused.scales.shape[-1] == sum(sizes) // 128) == all(size % 128 == 0 for size in sizes)
    for name, module in model.named_children():
        torch.testing.assert_close(module(a), expected[name], rtol=1e-5, atol=1e-5)
        assert torch.equal(module.to_packed().validate().dequantize(), before[name])


@pytest.mark.parametrize("columns", [256, 192])
def test_stacks_of_experts_hold_gate_and_up(columns):
    """Parts of 192 columns have a scale for each column, because 192 is no multiple of 128."""
    wide = [packed(K, 384, seed) for seed in range(4)]
    parts = [[weight.columns(slice(0, columns)), weight.columns(slice(384 - columns, None))] for weight in wide]
    stack = tmm.layers.ExpertWeights.from_packed(parts)
    assert stack.scales.shape == (4, 3, 4 if columns == 256 else 384)
    for index, pair in enumerate(parts):
        for part, weight in enumerate(pair):
            for copy in (True, False):
                assert torch.equal(stack.to_packed(index, part, copy=copy).scales, weight.scales)
            assert torch.equal(stack.to_packed(index, part).validate().dequantize(), weight.dequantize())


@pytest.mark.parametrize("without", [0, 1, 2])
def test_one_expert_without_blocks_gives_each_column_a_scale(without):
    weights = [packed(seed=seed) for seed in range(3)]
    held = [weight.expanded_scales() if i == without else weight for i, weight in enumerate(weights)]
    stack = tmm.layers.ExpertWeights.from_packed([[weight] for weight in held])
    assert stack.scales.shape[-1] == weights[0].N
    for i, weight in enumerate(weights):
        assert torch.equal(stack.to_packed(i).validate().dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.ones(2, 1)}, "[G, N] = [2, 256], got float32 [2, 1]"),
        ({"scales": torch.ones(1, 2)}, "[G, N/128] = [2, 2], got float32 [1, 2]"),
        ({"scales": torch.ones(2, 2, dtype=torch.uint8)}, "float16, bfloat16 or float32 [G, N/128] = [2, 2]"),
        ({"group_size": 64}, "[G, N] = [4, 256], got float32 [2, 2]"),
        ({"weight_format": "uint8b128"}, "[G, N] = [2, 256], got float32 [2, 2]"),
        ({"super_scales": torch.ones(1, 256)}, "scales: expected uint8 or int8 codes [G, N] = [2, 256]"),
    ],
)
def test_wrong_shapes_are_named(change, message):
    given: dict[str, Any] = {
        "b_packed": torch.zeros(64, 256, dtype=torch.int32),
        "scales": torch.ones(2, 2),
        "weight_format": FORMAT,
        "group_size": GROUP,
    }
    OPS.dequantize(**given)
    with pytest.raises(ValueError, match=re.escape(message)):
        OPS.dequantize(**given | change)
    if "group_size" in change or "weight_format" in change:
        with pytest.raises(ValueError, match=r"scales: expected shape \[. 256\]|scales: expected shape \[., 256\]"):
            tmm.PackedWeight(**given | change).validate()
