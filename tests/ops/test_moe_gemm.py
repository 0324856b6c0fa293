"""moe_gemm multiplies each token with its experts' weights, for any routing, and names wrong arguments."""

import re

import pytest
import torch

from tests.support import experts as reference_experts
from tests.support import reference
from tests.support.dispatches import dispatches_of, longest_plan
from tests.support.experts import Experts, experts_of, make_experts, run
from tests.support.reference import random

OPS = torch.ops.torch_marlin_metal
PACKED, SCALES = 1, 2  # buffer slots


def check(a: torch.Tensor, experts: Experts, ids: torch.Tensor, device: str = "cpu", **options) -> None:
    got = run(a, experts, ids, device, **options)
    options.pop("variant", None)
    exact, bound = reference_experts.moe_gemm(a, experts, ids, raw_codes=reference.sums_raw_codes(device), **options)
    reference.check_gemm(got, exact, bound)
    assert got.dtype == a.dtype


# Each format with each activation dtype and one form of the call.
CASES = [
    (weight_format, dtype, 3 * i + j)
    for i, weight_format in enumerate(reference.FORMATS)
    for j, dtype in enumerate(reference.DTYPES)
]


def check_case(weight_format: str, dtype: torch.dtype, case: int, device: str) -> None:
    use_perm, by_slot, reduce = case % 2 == 1, case // 2 % 2 == 1, case // 3 % 2 == 1
    experts = experts_of(weight_format, use_perm=use_perm)
    ids = torch.tensor([[0, 4, 2], [4, 1, -1], [2, 2, 0], [5, -3, 7]], dtype=(torch.int64, torch.int32)[case % 2])
    a = random(4, 3, 80, dtype=dtype) if by_slot else random(4, 80, dtype=dtype)
    options = {"bias": random(5, 41, dtype=torch.float16, seed=1)} if case % 3 != 1 else {}
    if case % 3 != 2:
        options["row_weights"] = random(4, 3, dtype=reference.DTYPES[case % 3], seed=2).abs()
    check(a, experts, ids, device, reduce=reduce, **options)


@pytest.mark.parametrize(("weight_format", "dtype", "case"), CASES)
def test_every_expert_is_within_the_bound(weight_format, dtype, case):
    check_case(weight_format, dtype, case, "cpu")


# Each weight format once, because the software device compiles a kernel for every pair of format and dtype.
@pytest.mark.parametrize(("weight_format", "dtype", "case"), CASES[::4] + CASES[9:10])
def test_every_expert_is_within_the_bound_on_mps(weight_format, dtype, case, mps):
    check_case(weight_format, dtype, case, mps)


ROUTINGS = {
    "one token": (torch.tensor([[3, 0]]), 5),
    "all tokens to one expert": (torch.full((70, 1), 2), 5),
    "one expert": (torch.zeros(9, 1, dtype=torch.int64), 1),
    "ten slots of 16 experts": (torch.stack([torch.randperm(16)[:10] for _ in range(13)]), 16),
    "most experts empty": (torch.tensor([[511, 3], [0, 511], [511, 77]]), 512),
    "skewed": (torch.tensor([[0]] * 33 + [[1]] * 3 + [[4]] * 17), 5),
    "no expert at all": (torch.full((3, 2), 5), 5),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_any_routing(name, device):
    ids, E = ROUTINGS[name]
    experts = experts_of("uint4b8", E=E, K=32 if E == 512 else 144, N=24)
    a = random(len(ids), experts.weights[0].exact.shape[0], dtype=torch.float16)
    check(a, experts, ids, device)
    check(a, experts, ids, device, reduce=True, row_weights=random(*ids.shape, seed=3))


# weight format, experts, K, N, group size, top_k
REAL_LAYERS = {
    "Qwen3 30B, gate and up": ("uint4b8", 128, 2048, 1536, 128, 8),
    "Qwen3 30B, down": ("uint4b8", 128, 768, 2048, 128, 8),
    "gpt-oss 20B, gate and up": ("mxfp4", 32, 2880, 5760, 32, 4),
    "gpt-oss 20B, down": ("mxfp4", 32, 2880, 2880, 32, 4),
}


@pytest.mark.parametrize("name", REAL_LAYERS)
def test_layers_of_real_size(name):
    """Compares 24 columns with fp64. The scales of unused experts are NaN."""
    weight_format, E, K, N, group_size, top_k = REAL_LAYERS[name]
    generator = torch.Generator().manual_seed(N)
    chosen = torch.randperm(E, generator=generator)[: 2 * top_k]
    known = make_experts(weight_format, 2 * top_k, K, 24, group_size)
    columns = torch.linspace(0, N - 1, 24).long()
    words = torch.zeros(E, K // 8, N, dtype=torch.int32)
    words[chosen] = torch.randint(-(2**31), 2**31 - 1, (2 * top_k, K // 8, N), dtype=torch.int32, generator=generator)
    not_a_number = 255 if weight_format == "mxfp4" else torch.nan
    scales = torch.full((E, K // group_size, N), not_a_number, dtype=known.scales.dtype)
    scales[chosen] = known.scales[:, :, :1]
    words[chosen[:, None], :, columns] = known.b_packed.transpose(1, 2)
    scales[chosen[:, None], :, columns] = known.scales.transpose(1, 2)
    is_down = name.endswith("down")
    a = random(2, top_k, K) if is_down else random(2, K)
    options = {"row_weights": random(2, top_k, seed=3), "reduce": True} if is_down else {}
    got = OPS.moe_gemm(a, words, scales, chosen.view(2, top_k), **known.arguments, **options)
    assert got.isfinite().all()
    exact, bound = reference_experts.moe_gemm(a, known, torch.arange(2 * top_k).view(2, top_k), **options)
    reference.check_gemm(got[..., columns], exact, bound)


def test_the_same_bits_on_every_call(device):
    experts = experts_of("uint4", E=8, K=272, N=70)
    ids = torch.randint(-1, 9, (40, 3), generator=torch.Generator().manual_seed(1))
    a, weights = random(40, 272, dtype=torch.bfloat16), random(40, 3)
    first = run(a, experts, ids, device, row_weights=weights, reduce=True)
    assert torch.equal(run(a, experts, ids, device, row_weights=weights, reduce=True), first)


def test_a_token_does_not_depend_on_the_others(device):
    """A token has the same result alone as with others, within rounding. Ids that name no expert read no weight."""
    experts = experts_of("uint4b8", E=6)
    experts.scales[5] = torch.nan
    ids = torch.tensor([[0, 5], [1, 2], [-1, 6]])
    got = run(random(3, 80), experts, ids, device)
    assert got[0, 1].isnan().all()
    assert not got[1].isnan().any()
    assert torch.equal(got[2], torch.zeros(2, 41))
    reduced = run(random(3, 80), experts, ids, device, reduce=True, row_weights=torch.full((3, 2), torch.nan))
    assert reduced[:2].isnan().all()
    assert torch.equal(reduced[2], torch.zeros(41))


def test_strides_and_offsets(device):
    experts = experts_of("uint4_bias")
    ids = torch.tensor([[0, 1, 2, 3], [4, 0, 1, 2]]).t()
    wide = random(2, 5, 160)
    every_other = wide.transpose(0, 1)[1:, :, ::2]
    check(every_other, experts, ids, device)
    for reduce in (False, True):
        check(wide[:, 1:].transpose(0, 1)[..., 16:96], experts, ids, device, reduce=reduce)
    check(random(80)[None].expand(4, 80), experts, ids, device)


@pytest.mark.parametrize(("T", "top_k"), [(0, 2), (3, 0), (0, 0)])
@pytest.mark.parametrize("reduce", [False, True])
def test_nothing_to_do(T, top_k, reduce, device):
    ids = torch.zeros(T, top_k, dtype=torch.int64)
    got = run(random(T, 80), experts_of("uint4b8"), ids, device, reduce=reduce)
    assert torch.equal(got, torch.zeros((T, 41) if reduce else (T, top_k, 41)))


def test_many_rows_of_an_expert_run_in_several_passes():
    experts = experts_of("uint4b8", E=2, K=16, N=8)
    ids = torch.cat([torch.zeros(1200, 1), torch.ones(5, 1)]).long()
    check(random(1205, 16), experts, ids)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        experts = experts_of("nvfp4", E=4, K=1040, N=200)
        check(random(3, 1040), experts, torch.tensor([[0, 3], [3, 3], [1, 0]]), reduce=True)
        check(random(1, 1040, dtype=torch.bfloat16), experts, torch.tensor([[0, 3, 1]]))
    finally:
        torch.set_num_threads(before)


def test_activations_that_a_kernel_cannot_represent_are_repeated():
    """fp32 activations below the bf16 range need another kernel than other activations (AMX, bf16 dot products)."""
    experts = experts_of("uint4b8", E=3)
    a = random(24, 80)
    a[3] *= 2.0**-110
    a[11] *= 2.0**100
    check(a, experts, (torch.arange(24) % 3)[:, None])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_opcheck(weight_format, requires_grad):
    experts = experts_of(weight_format)
    ids = torch.tensor([[0, 4], [1, 5], [2, 2]])
    weights = torch.rand(3, 2, requires_grad=requires_grad)
    torch.library.opcheck(
        OPS.moe_gemm.default,
        (random(3, 80).requires_grad_(requires_grad), experts.b_packed, experts.scales, ids),
        {**experts.arguments, "row_weights": weights, "reduce": weight_format != "uint4"},
    )


def test_the_gradient_of_rows_is_fp32_for_fake_tensors_too():
    experts = experts_of("uint4b8")
    ids = torch.tensor([[0, 4], [1, 5], [2, 2]])
    torch.library.opcheck(
        OPS.moe_gemm_grad_a.default,
        (random(3, 2, 41, dtype=torch.float16), experts.b_packed, experts.scales, ids),
        experts.arguments,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compile_with_a_dynamic_number_of_tokens_compiles_once():
    experts = experts_of("uint4")
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    torch._dynamo.reset()

    def block(a, ids, weights):
        y = torch.nn.functional.silu(OPS.moe_gemm(a, experts.b_packed, experts.scales, ids, **experts.arguments))
        return (y * weights[..., None]).sum(1)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for T in (3, 17, 64, 5):
        a, ids, weights = random(T, 80), torch.arange(2 * T).reshape(T, 2) % 7, torch.rand(T, 2)
        torch.testing.assert_close(compiled(a, ids, weights), block(a, ids, weights))
    assert counter.frame_count == 1


@pytest.mark.parametrize("reduce", [False, True])
def test_long_products_are_divided_by_tokens(reduce, mps):
    import softmetal

    experts = experts_of("uint4b8")
    ids = torch.randint(-1, 5, (150, 2), generator=torch.Generator().manual_seed(0))
    a, options = random(150, 80), {"row_weights": random(150, 2, seed=3), "reduce": reduce}
    softmetal.faults()
    with longest_plan(1e-9):
        check(a, experts, ids, "mps", **options)
    assert len(softmetal.counters()) >= 3  # 64, 64 and 22 tokens


def test_autocast_and_meta_tensors():
    experts = experts_of("uint4b8")
    ids = torch.tensor([[0, 4], [1, 5]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(random(2, 80), experts, ids)
    assert torch.equal(got, run(random(2, 80).bfloat16(), experts, ids))
    held = experts.to("meta")
    out = OPS.moe_gemm(torch.empty(2, 80, device="meta"), held.b_packed, held.scales, ids.to("meta"),
                       **held.arguments, reduce=True)  # fmt: skip
    assert (out.shape, out.device.type) == ((2, 41), "meta")


WRONG = {
    "a": [
        (torch.zeros(4, dtype=torch.int32), "a: expected float16, bfloat16 or float32 [T, K] or [T, top_k, K], got int32 [4]"),
        (torch.zeros(3, 72), "a: expected [T, K] or [T, top_k, K] with K = 80, got float32 [3, 72]"),
    ],
    "ids": [
        (torch.zeros(3, 2), "expert_ids: expected int32 or int64 [T, top_k] with T = 3, got float32 [3, 2]"),
        (torch.zeros(2, 2, dtype=torch.int64), "expert_ids: expected int32 or int64 [T, top_k] with T = 3, got int64 [2, 2]"),
        (torch.zeros(3, dtype=torch.int64), "expert_ids: expected int32 or int64 [T, top_k] with T = 3, got int64 [3]"),
        (torch.zeros(3, 2, dtype=torch.int64, device="meta"), "expert_ids: expected a tensor on cpu like the first argument, got int64 [3, 2] on meta"),
    ],
    "b_packed": [
        (torch.zeros(10, 41, dtype=torch.int32), "b_packed: expected int32 [E, K/8, N], got int32 [10, 41]"),
        (torch.zeros(0, 10, 41, dtype=torch.int32), "b_packed: expected at least one expert, got int32 [0, 10, 41]"),
        (torch.zeros(6, 10, 41, dtype=torch.int32), "scales: expected float16, bfloat16 or float32 [E, G, N] = [6, 5, 41], got float16 [5, 5, 41]"),
    ],
    "scales": [(torch.zeros(5, 41), "scales: expected float16, bfloat16 or float32 [E, G, N] = [5, 5, 41], got float32 [5, 41]")],
    "perm": [(torch.zeros(80, dtype=torch.int32), "perm: expected int32 [E, K] = [5, 80], got int32 [80]")],
    "bias": [(torch.zeros(41), "bias: expected float16, bfloat16 or float32 [E, N] = [5, 41], got float32 [41]")],
    "row_weights": [
        (torch.zeros(3), "row_weights: expected float16, bfloat16 or float32 [T, top_k] = [3, 2], got float32 [3]"),
        (torch.zeros(3, 2, dtype=torch.int64), "row_weights: expected float16, bfloat16 or float32 [T, top_k] = [3, 2], got int64 [3, 2]"),
    ],
    "global_scale": [(torch.ones(5), "global_scale: expected none for uint4b8, got float32 [5]")],
    "group_size": [(48, "group_size: expected one of 16, 32, 64, 128, 256, or K = 80 for uint4b8, got 48")],
    "variant": [
        ("mma", "variant: expected auto, gemv, fused or tensor, got 'mma'"),
        ("", "variant: expected auto, gemv, fused or tensor, got ''"),
        ("striped", "variant: expected auto, gemv, fused or tensor, got 'striped'"),
        ("rounded", "variant: expected auto, gemv, fused or tensor, got 'rounded'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "message"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_wrong_arguments_are_named(name, value, message):
    experts = experts_of("uint4b8")
    given = {"a": random(3, 80), "b_packed": experts.b_packed, "scales": experts.scales}
    given |= {"ids": torch.zeros(3, 2, dtype=torch.int64), **experts.arguments, name: value}
    positional = [given.pop(key) for key in ("a", "b_packed", "scales", "ids")]
    with pytest.raises(ValueError, match=re.escape(f"torch_marlin_metal::moe_gemm: {message}")):
        OPS.moe_gemm(*positional, **given)


def test_ids_that_disagree_with_rows_for_each_slot():
    experts = experts_of("uint4b8")
    message = "expert_ids: expected int32 or int64 [T, top_k] = [3, 4], got int64 [3, 2]"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(random(3, 4, 80), experts, torch.zeros(3, 2, dtype=torch.int64))


def test_global_scales_are_stacked_too():
    experts = experts_of("nvfp4")
    message = "global_scale: expected float32 [E], [E, 1] or [E, N] = [5, 41], got float32 [1]"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(random(1, 80), experts, torch.tensor([[0]]), global_scale=torch.ones(1))
    one = make_experts("nvfp4", 5, 80, 41, 16, global_scale_shape=())
    check(random(2, 80), one, torch.tensor([[0, 4], [1, 2]]))


def test_a_perm_outside_the_row_of_a_chosen_expert():
    experts = experts_of("uint4b8", use_perm=True)
    experts.arguments["perm"][3, 7] = 80
    with pytest.raises(IndexError, match=re.escape("moe_gemm: perm: expected indices in [0, K) with K = 80, got 80")):
        run(random(1, 80), experts, torch.tensor([[0, 3]]))
    run(random(1, 80), experts, torch.tensor([[0, 1]]))


@pytest.mark.parametrize("argument", ["scales", "zeros", "bias"])
def test_tensors_that_require_grad_are_refused(argument):
    experts = experts_of("uint4_bias")
    tensors = {"scales": experts.scales, "zeros": experts.arguments["zeros"], "bias": torch.zeros(5, 41)}
    tensors[argument].requires_grad_()
    message = f"torch_marlin_metal::moe_gemm: {argument}: expected a tensor that does not require grad"
    with pytest.raises(ValueError, match=message):
        run(random(1, 80), experts, torch.tensor([[0]]), bias=tensors["bias"])


def dispatched(a: torch.Tensor, experts: Experts, ids: torch.Tensor, **options) -> list:
    """Returns the counters of the dispatches of one call on mps."""
    held, a, ids = experts.to("mps"), a.to("mps"), ids.to("mps")
    options = {k: v.to("mps") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return dispatches_of(lambda: OPS.moe_gemm(a, held.b_packed, held.scales, ids, **held.arguments, **options))


def test_one_token_reads_exactly_the_weights_of_its_experts_in_one_dispatch(mps):
    experts = experts_of("uint4b8", E=6, K=160, N=136)
    ids = torch.tensor([[4, 1, -1]])
    (product,) = dispatched(random(1, 160, dtype=torch.float16), experts, ids)
    assert product.kernel.startswith("moe_gemv")
    assert product.buffers[PACKED]["distinct_read"] == 2 * 160 * 136 // 2
    assert product.buffers[SCALES]["distinct_read"] == 2 * 10 * 136 * 2
    options = {"reduce": True, "row_weights": torch.rand(1, 3)}
    (total,) = dispatched(random(1, 160, dtype=torch.float16), experts, ids, **options)
    assert total.kernel.startswith("moe_gemv_reduce")
    assert total.buffers[PACKED]["distinct_read"] == 2 * 160 * 136 // 2
    assert total.buffers[SCALES]["distinct_read"] == 2 * 10 * 136 * 2


@pytest.mark.parametrize(
    ("top_k", "options", "kernels"),
    [
        (20, {"reduce": True}, ["moe_gemv_reduce"]),  # a threadgroup has room for 20 slots
        (21, {"reduce": True}, ["moe_gemv", "moe_reduce"]),
        (2, {"row_weights": torch.rand(2, 2)}, ["moe_gemv", "moe_reduce"]),
    ],
)
def test_which_sums_take_one_dispatch(top_k, options, kernels, mps):
    experts = experts_of("uint4b8", E=25, K=64, N=136)
    ids = torch.stack([torch.randperm(25)[:top_k] for _ in range(2)])
    counters = dispatched(random(2, 64), experts, ids, **options)
    assert [c.kernel.split("_uint")[0].split("_float")[0] for c in counters] == kernels
    check(random(2, 64), experts, ids, mps, **options)


def test_many_rows_are_sorted_by_one_dispatch_and_read_only_the_experts_that_have_rows(mps):
    experts = experts_of("uint4b8", E=4, K=64, N=32)
    ids = torch.tensor([[0, 3]] * 20)
    counters = dispatched(random(20, 64), experts, ids, variant="fused", reduce=True)
    assert [c.kernel.split("_")[1] for c in counters] == ["sort", "fused", "reduce"]
    assert counters[1].buffers[PACKED]["distinct_read"] == 2 * 64 * 32 // 2


@pytest.mark.parametrize("variant", ["gemv", "fused"])
@pytest.mark.parametrize("use_perm", [False, True])
def test_each_kernel_on_mps(variant, use_perm, mps):
    experts = experts_of("nvfp4", K=144, use_perm=use_perm)
    ids = torch.randint(-1, 6, (25, 3), generator=torch.Generator().manual_seed(2))
    a = random(25, 3, 144, dtype=torch.bfloat16)
    check(a, experts, ids, "mps", variant=variant, bias=random(5, 41, seed=3))
    check(a, experts, ids, "mps", variant=variant, bias=random(5, 41, seed=3), reduce=True)


def test_other_variants_are_refused_on_mps(mps):
    with pytest.raises(ValueError, match="moe_gemm: variant: expected auto, gemv, fused or tensor, got 'striped'"):
        run(random(1, 80), experts_of("uint4b8"), torch.tensor([[0]]), "mps", variant="striped")
