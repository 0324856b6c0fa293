"""The operators work with PyTorch's features: opcheck, fake tensors, compile, export, autograd, vmap, autocast."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_marlin_metal as tmm
from tests.support import reference

OPS = torch.ops.torch_marlin_metal
# On mps, all formats use the same registration, so a sample is enough: zeros, coded scales, a table and two planes.
ON_MPS = ("uint4", "nvfp4", "lut4", "uint5_bias")
OF_ONE_PLANE_AND_TWO = [
    name if name in ON_MPS else pytest.param(name, marks=pytest.mark.beyond_sample)
    for name in (*reference.FORMATS, "uint5_bias")
]


def weight_of(weight_format: str, device: str, K: int = 64, N: int = 24) -> reference.Weight:
    options = {"global_scale_shape": ()} if weight_format == "nvfp4" else {}
    return reference.make_weight(weight_format, K, N, 32, **options).to(device)


def words(shape, device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator).to(torch.int32).to(device)


def utils(device: str) -> tuple[str, ...]:
    """Returns opcheck's tests.

    On mps, test_autograd_registration is left out, because torch 2.13 cannot run it there.
    """
    names = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    return names if device == "mps" else ("test_autograd_registration", *names)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("weight_format", OF_ONE_PLANE_AND_TWO)
def test_opcheck_gemm(weight_format, requires_grad, device):
    weight = weight_of(weight_format, device)
    a = torch.randn(3, 5, 64, device=device, requires_grad=requires_grad)
    bias = torch.randn(24, device=device, requires_grad=requires_grad)
    arguments = {**weight.arguments, "bias": bias}
    torch.library.opcheck(OPS.gemm.default, (a, weight.b_packed, weight.scales), arguments, test_utils=utils(device))


@pytest.mark.parametrize("weight_format", OF_ONE_PLANE_AND_TWO)
def test_opcheck_dequantize(weight_format, device):
    weight = weight_of(weight_format, device)
    torch.library.opcheck(
        OPS.dequantize.default,
        (weight.b_packed, weight.scales),
        {**weight.arguments, "dtype": torch.float32},
        test_utils=utils(device),
    )


@pytest.mark.parametrize("weight_format", OF_ONE_PLANE_AND_TWO)
def test_opcheck_embedding(weight_format, device):
    weight = weight_of(weight_format, device)
    torch.library.opcheck(
        OPS.embedding.default,
        (torch.tensor([[3, 0], [23, 3]], device=device), weight.b_packed, weight.scales),
        {**weight.arguments, "dtype": torch.float32},
        test_utils=utils(device),
    )


def test_opcheck_repacks(device):
    perm = torch.randperm(64, dtype=torch.int32).to(device)
    torch.library.opcheck(OPS.gptq_repack.default, (words((8, 24), device),), test_utils=utils(device))
    torch.library.opcheck(OPS.gptq_repack.default, (words((8, 24), device),), {"perm": perm}, test_utils=utils(device))
    torch.library.opcheck(
        OPS.gptq_unpack_zeros.default,
        (words((2, 3), device),),
        {"checkpoint_version": 1, "rule": "masked"},
        test_utils=utils(device),
    )
    torch.library.opcheck(OPS.awq_repack.default, (words((64, 3), device),), test_utils=utils(device))
    torch.library.opcheck(OPS.awq_unpack_zeros.default, (words((2, 3), device),), test_utils=utils(device))
    torch.library.opcheck(OPS.transpose_words.default, (words((24, 8), device),), test_utils=utils(device))


def test_compile_with_a_dynamic_number_of_rows_compiles_once(device):
    weight = weight_of("uint4", device)
    compiled_graphs = CompileCounterWithBackend("inductor")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend=compiled_graphs)
    def model(x):
        return torch.nn.functional.silu(OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments)) + 1

    for M in (3, 17, 100, 5):
        x = torch.randn(M, 64, device=device)
        expected = torch.nn.functional.silu(OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments)) + 1
        torch.testing.assert_close(model(x), expected)
    assert compiled_graphs.frame_count == 1


def test_compile_forward_and_backward(device):
    weight = weight_of("uint4b8", device)

    def loss(x, bias):
        return OPS.gemm(x, weight.b_packed, weight.scales, bias=bias, **weight.arguments).square().sum()

    x = torch.randn(5, 64, device=device, requires_grad=True)
    bias = torch.randn(24, device=device, requires_grad=True)
    expected = torch.autograd.grad(loss(x, bias), (x, bias))
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x, bias), (x, bias))
    torch.testing.assert_close(got, expected)


def test_export_keeps_the_operator_with_dynamic_rows(device):
    weight = weight_of("nvfp4", device)

    class Model(torch.nn.Module):
        def forward(self, x):
            return OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments)

    rows = torch.export.Dim("rows", min=1, max=4096)
    program = torch.export.export(Model(), (torch.randn(3, 64, device=device),), dynamic_shapes=({0: rows},))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert OPS.gemm.default in targets
    x = torch.randn(11, 64, device=device)
    assert torch.equal(program.module()(x), Model()(x))


@pytest.mark.parametrize("use_perm", [False, True])
@pytest.mark.parametrize("weight_format", OF_ONE_PLANE_AND_TWO)
def test_gradients_match_the_exact_weight(weight_format, use_perm, device):
    weight = weight_of(weight_format, device)
    perm = np.random.default_rng(0).permutation(64).astype(np.int32)
    exact = weight.exact
    if use_perm:
        weight.arguments["perm"] = torch.from_numpy(perm).to(device)
        exact = np.empty_like(weight.exact)
        exact[perm] = weight.exact
    x = torch.randn(2, 3, 64, device=device, requires_grad=True)
    bias = torch.randn(24, device=device, requires_grad=True)
    upstream = torch.randn(2, 3, 24)
    OPS.gemm(x, weight.b_packed, weight.scales, bias=bias, **weight.arguments).backward(upstream.to(device))
    expected = upstream.double().numpy() @ exact.T
    bound = 2.0**-20 * (np.abs(upstream.numpy()) @ np.abs(exact).T) + 1e-30
    assert (np.abs(reference.to_numpy(x.grad) - expected) <= bound).all()
    torch.testing.assert_close(bias.grad.cpu().double(), upstream.double().sum((0, 1)), rtol=1e-6, atol=1e-6)


def test_double_backward_is_linear_in_the_upstream_gradient(device):
    weight = weight_of("uint4b8", device)
    x = torch.randn(3, 64, device=device, requires_grad=True)
    upstream = torch.randn(3, 24, device=device, requires_grad=True)
    y = OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments)
    (grad,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), upstream)
    expected = OPS.gemm(torch.ones(3, 64, device=device), weight.b_packed, weight.scales, **weight.arguments)
    torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("argument", ["scales", "zeros", "global_scale", "lut"])
def test_other_tensors_that_require_grad_are_refused(argument, device):
    weight = weight_of({"global_scale": "nvfp4", "lut": "lut4"}.get(argument, "uint4_bias"), device)
    tensor = weight.scales if argument == "scales" else weight.arguments[argument]
    tensor.requires_grad_()
    x = torch.randn(3, 64, device=device)
    message = f"torch_marlin_metal::gemm: {argument}: expected a tensor that does not require grad"
    with pytest.raises(ValueError, match=message):
        OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments)
    with pytest.raises(ValueError, match=message.replace("gemm", "dequantize")):
        OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments)
    with pytest.raises(ValueError, match=message.replace("gemm", "embedding")):
        OPS.embedding(
            torch.zeros(1, dtype=torch.int64, device=device), weight.b_packed, weight.scales, **weight.arguments
        )
    with torch.no_grad():
        OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_the_activations(device):
    weight = weight_of("float4_e2m1", device)
    x = torch.randn(4, 3, 64, device=device)
    mapped = torch.func.vmap(lambda row: OPS.gemm(row, weight.b_packed, weight.scales, **weight.arguments))(x)
    torch.testing.assert_close(mapped, OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_the_activations(dtype, device):
    weight = weight_of("uint4b8", device)
    x = torch.randn(3, 64, device=device)
    with torch.autocast(device, dtype=dtype):
        got = OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments)
    assert torch.equal(got, OPS.gemm(x.to(dtype), weight.b_packed, weight.scales, **weight.arguments))


def test_inference_mode(device):
    weight = weight_of("uint4b8", device)
    x = torch.randn(3, 64, device=device)
    with torch.inference_mode():
        got = OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments)
    assert got.is_inference()
    assert torch.equal(got.cpu(), OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments).cpu())


@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_meta_tensors(weight_format):
    weight = weight_of(weight_format, "cpu").to("meta")
    out = OPS.gemm(
        torch.empty(2, 5, 64, device="meta", dtype=torch.bfloat16), weight.b_packed, weight.scales, **weight.arguments
    )
    assert (out.shape, out.dtype, out.device.type) == ((2, 5, 24), torch.bfloat16, "meta")
    dense = OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments)
    assert (dense.shape, dense.dtype) == ((64, 24), torch.float16)
    assert tmm.ops.awq_repack(torch.empty(64, 3, dtype=torch.int32, device="meta")).shape == (8, 24)
    assert tmm.ops.transpose_words(torch.empty(24, 3, dtype=torch.int32, device="meta")).shape == (3, 24)


@pytest.mark.parametrize("argument", ["a", "bias", "scales"])
def test_forward_mode_is_refused_by_name(argument, device):
    weight = weight_of("uint4b8", device)
    tensors = {"a": torch.randn(3, 64, device=device), "bias": torch.randn(24, device=device)}
    tensors["scales"] = weight.scales
    message = f"torch_marlin_metal::gemm: {argument}: expected no forward-mode tangent"
    with torch.autograd.forward_ad.dual_level():
        primal = tensors[argument]
        dual = {**tensors, argument: torch.autograd.forward_ad.make_dual(primal, torch.ones_like(primal))}
        with pytest.raises(ValueError, match=message):
            OPS.gemm(dual["a"], weight.b_packed, dual["scales"], bias=dual["bias"], **weight.arguments)
    with pytest.raises((ValueError, RuntimeError), match=r"forward-mode tangent|functorch transforms"):
        torch.func.jvp(
            lambda t: OPS.gemm(t, weight.b_packed, weight.scales, **weight.arguments),
            (tensors["a"],),
            (torch.ones_like(tensors["a"]),),
        )


def test_copy_on_write_activations(device):
    weight = weight_of("uint4b8", device)
    x = torch.randn(3, 64, device=device)
    expected = OPS.gemm(x, weight.b_packed, weight.scales, **weight.arguments)
    assert torch.equal(OPS.gemm(torch._lazy_clone(x), weight.b_packed, weight.scales, **weight.arguments), expected)


def test_a_repeated_index_of_perm_leaves_the_other_rows_at_zero():
    # CPU only: on mps, rows that share an index write the same output, which checked mode reports as a race.
    weight = weight_of("uint4b8", "cpu")
    perm = torch.zeros(64, dtype=torch.int32)
    dense = OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments, perm=perm)
    assert not dense[1:].any()
