"""MarlinEmbedding: quantizes nn.Embedding, shares its table with a tied head, saves, moves and compiles."""

import copy

import pytest
import torch
from torch import nn

import torch_marlin_metal as tmm


def embedding(rows: int = 40, length: int = 64, **options) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(rows, length, **options)


IDS = torch.tensor([[1, 39, 0], [7, 7, 2]])


# tests/ops/test_embedding.py runs the kernel of each format.
ON_MPS = ("uint4", "nvfp4", "uint5b16", "mxfp8")
BOTH = [
    pytest.param(name, device, marks=pytest.mark.whole if device == "mps" and name not in ON_MPS else [])
    for name in tmm.WEIGHT_FORMATS
    for device in ("cpu", "mps")
]


@pytest.mark.parametrize("weight_format", ["q4_k", "q6_k", "nvfp4"])
def test_absent_buffers_come_last(weight_format):
    layer = tmm.MarlinEmbedding.from_embedding(embedding(length=256), weight_format)
    held = [tensor is not None for tensor in layer._buffers.values()]
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize(("weight_format", "device"), BOTH, indirect=["device"])
def test_from_embedding_looks_up_the_quantized_table(weight_format, device):
    dense = embedding().to(device)
    options = {"lut": torch.linspace(-1, 1, 16)} if weight_format == "lut4" else {}
    layer = tmm.MarlinEmbedding.from_embedding(dense, weight_format, **options)
    expected = tmm.quantize_weight(dense.weight, weight_format, **options).dequantize(torch.float32).T
    rows = layer(IDS.to(device))
    assert torch.equal(rows, expected[IDS.to(device)])
    error = (rows - dense(IDS.to(device))).norm() / dense(IDS.to(device)).norm()
    assert error < 0.25


def test_a_tied_head_shares_the_words():
    layer = tmm.MarlinEmbedding.from_embedding(embedding(), "uint4", group_size=32)
    head = layer.tied_linear()
    assert head.b_packed is layer.b_packed
    assert type(head) is tmm.MarlinLinear
    x = torch.randn(3, 64)
    torch.testing.assert_close(head(x), x @ layer(torch.arange(40)).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rows_have_the_dtype_of_the_layer(dtype, device):
    layer = tmm.MarlinEmbedding.from_embedding(embedding(), "uint4b8").to(device)
    full = layer(IDS.to(device))
    rows = copy.deepcopy(layer).to(dtype)(IDS.to(device))
    assert rows.dtype == dtype
    assert torch.equal(rows, full.to(dtype))


def test_state_dict_round_trip():
    layer = tmm.MarlinEmbedding.from_embedding(embedding(padding_idx=2), "uint4", group_size=32)
    empty = tmm.MarlinEmbedding(40, 64, 2, weight_format="uint4", group_size=32)
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(IDS), layer(IDS))
    with pytest.raises(RuntimeError, match="packed_format: expected uint4b8"):
        tmm.MarlinEmbedding(40, 64).load_state_dict(layer.state_dict())


def test_compiles_without_a_break(device):
    layer = tmm.MarlinEmbedding.from_embedding(embedding(), "nvfp4").to(device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: layer(ids) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3,), (2, 5)):
        ids = torch.randint(40, shape, device=device)
        torch.testing.assert_close(compiled(ids), layer(ids) * 2)


@pytest.mark.parametrize(("made", "reason"), [
    (lambda: embedding(max_norm=1.0), "it has max_norm=1.0"),
    (lambda: embedding(sparse=True), "it has sparse=True"),
    (lambda: embedding(length=12), "its rows of 12 are not a positive multiple of 8 long"),
    (lambda: nn.Linear(8, 8), "expected nn.Embedding, got Linear"),
])  # fmt: skip
def test_embeddings_that_do_more_than_look_up_are_refused(made, reason):
    with pytest.raises(ValueError, match=f"MarlinEmbedding: embedding: {reason}"):
        tmm.MarlinEmbedding.from_embedding(made())


def test_a_bias_is_refused():
    packed = tmm.quantize_weight(torch.randn(16, 64))
    packed.bias = torch.zeros(16)
    with pytest.raises(ValueError, match="MarlinEmbedding: packed: expected no bias"):
        tmm.MarlinEmbedding.from_packed(packed)
