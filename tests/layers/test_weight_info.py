"""`layer.weight` of a packed layer has the attributes that models read; any other use raises an explaining error."""

import copy
import operator
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from torch_marlin_metal import MarlinEmbedding, MarlinLinear, fuse_projections
from torch_marlin_metal.layers.weight_info import WeightInfo

N, K = 32, 64
ANSWERED = {"dtype", "device", "shape", "ndim", "size", "dim", "numel", "requires_grad"}
WHAT_TO_DO = r"got the weight of a packed layer.*layer\.dequantize\(\) for the values"


def packed_layer() -> MarlinLinear:
    torch.manual_seed(0)
    return MarlinLinear.from_linear(nn.Linear(K, N))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = packed_layer(), packed_layer(), packed_layer()


def fused() -> nn.Module:
    model = nn.Sequential(Attention())
    fuse_projections(model)
    return model


LAYERS = [packed_layer, lambda: MarlinEmbedding.from_embedding(nn.Embedding(N, K)), lambda: fused()[0].q_proj]


@pytest.mark.parametrize("make", LAYERS)
def test_what_models_read(make):
    weight = make().weight
    assert type(weight) is WeightInfo
    assert (weight.dtype, weight.device.type, weight.shape) == (torch.float32, "cpu", torch.Size([N, K]))
    assert (weight.size(), weight.size(0), weight.dim(), weight.ndim, weight.numel()) == ((N, K), N, 2, 2, N * K)
    assert (weight.requires_grad, "shape=[32, 64]" in repr(weight)) == (False, True)
    assert getattr(weight, "quant_state", None) is None
    assert not hasattr(weight, "CB")
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert (copied.shape, copied.dtype) == (weight.shape, weight.dtype)


def attributes_of_tensors() -> list[str]:
    return sorted(name for name in dir(torch.empty(2, 2)) if not name.startswith("_") and name not in ANSWERED)


def test_every_other_attribute_of_a_tensor_is_explained():
    weight, names = packed_layer().weight, attributes_of_tensors()
    assert {"data", "T", "mT", "to", "float", "detach", "norm", "is_cuda", "copy_", "data_ptr", "narrow"} <= set(names)
    for name in names:
        with pytest.raises(AttributeError, match=rf"^weight\.{name}: {WHAT_TO_DO}"):
            getattr(weight, name)


@pytest.mark.parametrize("name", ["data", "grad", "requires_grad", "quant_state"])
def test_an_attribute_that_would_be_lost_is_refused(name):
    with pytest.raises(AttributeError, match=rf"^weight\.{name} = \.\.\.: {WHAT_TO_DO}"):
        setattr(packed_layer().weight, name, torch.ones(1))
    packed_layer().weight.requires_grad = False


UNARY = [operator.neg, operator.pos, operator.invert, abs, len, iter, bool, float, int, operator.index, np.asarray]
BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, operator.floordiv, operator.mod),
    *(operator.pow, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.getitem),
    *(operator.and_, operator.or_, operator.xor, operator.iadd, operator.isub, operator.imul, operator.contains),
]


@pytest.mark.parametrize("function", UNARY)
def test_operators_of_one_operand_are_explained(function):
    with pytest.raises(TypeError, match=WHAT_TO_DO):
        function(packed_layer().weight)


@pytest.mark.parametrize("function", BINARY)
def test_operators_of_two_operands_are_explained(function):
    weight = packed_layer().weight
    with pytest.raises(TypeError, match=WHAT_TO_DO):
        function(weight, 2)
    with pytest.raises(TypeError, match=WHAT_TO_DO):
        function(weight, torch.ones(K, K))
    if function not in (operator.getitem, operator.contains):
        with pytest.raises(TypeError, match=WHAT_TO_DO):
            function(torch.ones(N, N), weight)


def test_functions_of_torch_are_explained(device):
    layer = packed_layer().to(device)
    assert layer.weight.device.type == device
    with pytest.raises(TypeError, match=f"^linear: {WHAT_TO_DO}"):
        nn.functional.linear(torch.ones(1, K, device=device), layer.weight)
    assert layer.weight != layer.weight.shape
    assert "weight" not in dict(layer.named_parameters())


def test_a_model_that_reads_the_weight_compiles():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = packed_layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.layer.weight
            wide = x.to(weight.dtype) if weight.shape[0] == N and weight.size(1) == K and weight.dim() == 2 else x
            return self.layer(wide)

    model, x = Reads(), torch.ones(2, K, dtype=torch.float16)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), model(x))
