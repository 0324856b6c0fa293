"""replace_linear_layers names every packed layer that it does not read, and quantize_model every table."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from torch_marlin_metal import MarlinEmbedding, MarlinLinear, quantize_model
from torch_marlin_metal.convert import replace_linear_layers

K, N = 64, 32


class WrappedInt4(Tensor):
    """Imitates the tensors of torchao and quanto, which have a float dtype but contain packed integers."""

    __module__ = "torchao.fake"

    def __new__(cls, words: Tensor, scale: Tensor) -> "WrappedInt4":
        shape = (words.shape[0], 2 * words.shape[1])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, requires_grad=False)

    def __init__(self, words: Tensor, scale: Tensor) -> None:
        self.words, self.scale = words, scale

    def __tensor_flatten__(self):
        return ["words", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return WrappedInt4(inner["words"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return WrappedInt4(args[0].words, args[0].scale)
        plain = tree_map(lambda x: torch.zeros(x.shape) if isinstance(x, WrappedInt4) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def wrapped() -> WrappedInt4:
    return WrappedInt4(torch.zeros(N, K // 2, dtype=torch.uint8), torch.ones(N))


def torchao_linear() -> nn.Module:
    linear = nn.Linear(K, N)
    linear.weight = nn.Parameter(wrapped(), requires_grad=False)
    return linear


def torchao_table() -> nn.Module:
    table = nn.Embedding(N, K)
    table.weight = nn.Parameter(wrapped(), requires_grad=False)
    return table


class UnknownLinear(nn.Module):
    """Imitates a layer of an unknown package."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = K, N
        self.register_buffer("codes", torch.zeros(N, K // 2, dtype=torch.uint8).view(dtype))


DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2]
CASES = {
    "torchao": (torchao_linear, "its weight is a WrappedInt4 of torchao, which is not read in memory"),
    "torchao table": (torchao_table, "its weight is a WrappedInt4 of torchao, which is not read in memory"),
} | {
    str(dtype): (lambda dtype=dtype: UnknownLinear(dtype), rf"its codes is {dtype}, in a layout of .* that is not read")
    for dtype in DTYPES
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_read_is_named(case):
    make, message = CASES[case]
    layer = make()
    model = nn.ModuleDict(
        {"layer": layer, "floats": nn.Linear(K, N), "packed": MarlinLinear.from_linear(nn.Linear(K, N))}
    )
    report = replace_linear_layers(model, progress=False)
    (entry,) = report.left
    assert (entry.name, model["layer"] is layer) == ("layer", True)
    assert re.match(message, entry.reason)
    assert "load_quantized" in entry.reason
    assert "0 layers converted, 1 left" in report.summary()
    assert replace_linear_layers(model, exclude=lambda name, _: name == "layer", progress=False).layers == []


def test_ordinary_modules_are_not_named():
    model = nn.ModuleList([nn.Linear(K, N), nn.Embedding(N, K), nn.Conv2d(3, 8, 3), nn.MultiheadAttention(K, 2)])
    model[0].register_buffer("position_ids", torch.arange(8)[None])
    assert replace_linear_layers(model, progress=False).layers == []


@pytest.mark.parametrize("del_orig", [True, False])
def test_hqq_that_keeps_the_layer_it_was_made_of(del_orig):
    hqq = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed", exc_type=ImportError)
    torch.manual_seed(0)
    source = nn.Linear(K, N)
    bias = source.bias.detach().clone()
    settings = hqq.BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    layer = hqq.HQQLinear(source, settings, del_orig=del_orig, compute_dtype=torch.float32, device="cpu")
    expected = layer.dequantize().detach()
    model = nn.ModuleDict({"layer": layer})
    (entry,) = replace_linear_layers(model, progress=False).layers
    assert entry.reason == ""
    assert isinstance(model["layer"], MarlinLinear)
    torch.testing.assert_close(model["layer"].dequantize(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model["layer"].bias.detach(), bias)


class Tables(nn.Module):
    """Has a vocabulary table, a table of positions, and a bag, like a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(N, K), nn.Embedding(16, K)
        self.bag, self.linear = nn.EmbeddingBag(N, K), nn.Linear(K, 4 * K)

    def get_input_embeddings(self) -> nn.Module:
        return self.words


def test_every_table_that_stays_is_listed():
    model = Tables()
    report = quantize_model(model, "uint4", 32, vocabulary_format="uint4", progress=False)
    assert isinstance(model.words, MarlinEmbedding)
    left = {layer.name: layer.reason for layer in report.left}
    assert left.keys() == {"positions.weight", "bag.weight"}
    assert left["bag.weight"] == (
        "a table inside EmbeddingBag; only Linear layers and tables of the vocabulary in an nn.Embedding are packed"
    )
    assert [layer.name for layer in quantize_model(Tables(), "uint4", 32, progress=False).left] == []
