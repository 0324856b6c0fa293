"""Tensors that are not dense, and torch.jit.script, are refused with an error of this package."""

import contextlib

import pytest
import torch
from torch import nn

from tests.layers.test_weight_info import K, N, fused, packed_layer
from torch_marlin_metal import MarlinEmbedding, quantize_model
from torch_marlin_metal.layouts import NAMESPACE

PARTS = [torch.ones(3, K), torch.ones(5, K)]
NESTED = {
    "strided": (lambda: torch.nested.nested_tensor(PARTS), r"a nested tensor: pass the parts of \.unbind\(\)"),
    "jagged": (lambda: torch.nested.nested_tensor(PARTS, layout=torch.jagged), r"a nested tensor: pass \.values\(\)"),
}
OTHERS = {
    "coo": (lambda: torch.ones(2, K).to_sparse(), r"layout torch.sparse_coo: use \.to_dense\(\)"),
    "csr": (lambda: torch.ones(2, K).to_sparse_csr(), r"layout torch.sparse_csr: use \.to_dense\(\)"),
    "mkldnn": (lambda: torch.ones(2, K).to_mkldnn(), r"layout torch._mkldnn: use \.to_dense\(\)"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2, K), 0.1, 0, torch.qint8),
        r"torch.qint8: use \.dequantize\(\)",
    ),
}


@pytest.mark.parametrize(
    "mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode], ids=["grad", "no_grad", "inference"]
)
@pytest.mark.parametrize("kind", [*NESTED, *OTHERS])
def test_a_tensor_that_is_not_dense_is_named(kind, mode):
    make, message = (NESTED | OTHERS)[kind]
    with mode(), pytest.raises(ValueError, match=f"^gemm: expected dense tensors, got .*{message}"):
        packed_layer()(make())


def test_what_the_message_says_works():
    whole, packed = NESTED["jagged"][0](), packed_layer()
    result = torch.nested.nested_tensor_from_jagged(packed(whole.values()), whole.offsets())
    for part, expected in zip(result.unbind(), map(packed, PARTS), strict=True):
        assert torch.equal(part, expected)
    assert [packed(part).shape for part in NESTED["strided"][0]().unbind()] == [(3, N), (5, N)]
    assert torch.equal(packed(OTHERS["coo"][0]().to_dense()), packed(torch.ones(2, K)))


def test_every_operator_refuses_them():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NAMESPACE}::")]
    assert f"{NAMESPACE}::moe_gemm" in names
    for name in names:
        for key in (
            "AutogradNestedTensor",
            "NestedTensorCPU",
            "SparseCPU",
            "SparseCsrCPU",
            "MkldnnCPU",
            "QuantizedCPU",
        ):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)


def test_scripting_is_refused_and_tracing_works():
    model = nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Linear(K, N))
    quantize_model(model, progress=False)
    message = "^torch.jit.script: expected a model without packed layers, got {}: use torch.compile"
    with pytest.raises(ValueError, match=message.format("MarlinLinear")):
        torch.jit.script(model)
    with pytest.raises(ValueError, match=message.format("MarlinEmbedding")):
        torch.jit.script(MarlinEmbedding.from_embedding(nn.Embedding(N, K)))
    with pytest.raises(ValueError, match=message.format("MarlinLinear")):
        torch.jit.script(fused())
    x = torch.ones(2, K)
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))
