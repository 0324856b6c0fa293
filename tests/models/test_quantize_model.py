"""quantize_model converts the right layers, reports a reason for every other layer, and changes all layers or none."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.support.models import fail_at, make_model, same, tensors, tree
from tests.support.reference import FORMATS
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models import quantize as model_module
from torch_marlin_metal.models.quantize import quantize_model
from torch_marlin_metal.models.report import LayerReport, Report
from torch_marlin_metal.quantize import recipe


# tests/quantize quantizes to every format on both devices.
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    "weight_format",
    [name if name in ("uint4b8", "nvfp4") else pytest.param(name, marks=pytest.mark.beyond_sample) for name in FORMATS],
)
def test_every_linear_is_replaced(weight_format, atomic, device):
    model = make_model(device)
    dense = copy.deepcopy(model)
    size = None if weight_format in ("nvfp4", "mxfp4") else 32
    report = quantize_model(model, weight_format, size, progress=False, atomic=atomic)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert [layer.name for layer in report.converted] == [f"{i}.{name}" for i in range(3) for name in ("up", "down")]
    assert not report.left
    for layer in report.layers:
        old, new = dense.get_submodule(layer.name), model.get_submodule(layer.name)
        expected = ((new.dequantize() - old.weight).norm() / old.weight.norm()).item()
        assert layer.error == pytest.approx(expected, rel=1e-4)
        assert 0.01 < layer.error < (0.2 if weight_format == "mxfp4" else 0.13)
        assert layer.shape == (old.out_features, old.in_features)
        assert layer.bytes_before == sum(p.nbytes for p in old.parameters())
        assert layer.bytes_after == sum(t.nbytes for t in (*new.parameters(), *new.buffers()))
        assert not new.training
    assert report.bytes_after < 0.3 * report.bytes_before
    x = torch.randn(4, 64, device=device)
    with torch.no_grad():
        assert nn.functional.cosine_similarity(model(x), dense(x)).min() > 0.95


def test_error_is_measured_in_chunks_of_columns(monkeypatch, device):
    whole = quantize_model(make_model(device), "uint4", 32, progress=False)
    monkeypatch.setattr(model_module, "ERROR_COLUMNS", 7)
    parts = quantize_model(make_model(device), "uint4", 32, progress=False)
    assert [layer.error for layer in parts.layers] == pytest.approx([layer.error for layer in whole.layers], rel=1e-5)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (lambda name, module: module.bias is None, None, {"0.down", "1.down", "2.down"}),
        ("*.up", lambda name, module: name.startswith("2"), {"0.up", "1.up"}),
    ],
)
def test_include_and_exclude(include, exclude, expected, device):
    model = make_model(device)
    report = quantize_model(model, "uint4b8", 32, include=include, exclude=exclude, progress=False)
    assert {layer.name for layer in report.layers} == expected
    assert {name for name, module in model.named_modules() if isinstance(module, MarlinLinear)} == expected


def test_a_pattern_that_fits_nothing_is_named(device):
    model = make_model(device)
    with pytest.raises(ValueError, match=r"quantize_model: include: 'encoder.\*' matches none of the 6 layers"):
        quantize_model(model, include=["*.up", "encoder.*"], progress=False)
    with pytest.raises(ValueError, match=r"exclude: 'up' matches none of the 6 layers; .* '\*up\*' takes 0.up"):
        quantize_model(model, exclude="up", progress=False)


def test_layers_that_stay_are_listed_with_the_reason():
    model = nn.ModuleDict(
        {
            "fine": nn.Linear(64, 8),
            "narrow": nn.Linear(12, 8),
            "wide": nn.Linear(64, 8, dtype=torch.float64),
            "attention": nn.MultiheadAttention(64, 4),
            "normed": nn.utils.weight_norm(nn.Linear(64, 8)),
            "orthogonal": parametrizations.orthogonal(nn.Linear(64, 8)),
            "infinite": nn.Linear(64, 8),
            "nowhere": nn.Linear(64, 8, device="meta"),
            "patched": nn.Linear(64, 8),
            "embedding": nn.Embedding(8, 64),
            "head": nn.Linear(64, 8, bias=False),
        }
    )
    model["infinite"].weight.data[3, 5] = float("inf")
    model["patched"].forward = lambda x: x
    model["head"].weight = model["embedding"].weight
    before = tree(model)
    with pytest.warns(UserWarning, match=r"only 2% of the matrix weights were quantized; .*; attention.out_proj \("):
        report = quantize_model(model, "uint4b8", 32, progress=False)
    assert [layer.name for layer in report.converted] == ["fine"]
    reasons = {layer.name: layer.reason for layer in report.left}
    assert reasons == {
        "narrow": "K = 12 is not a positive multiple of 8",
        "wide": "its weight is torch.float64; expected float16, bfloat16 or float32",
        "attention.out_proj": "NonDynamicallyQuantizableLinear is never called",
        "attention.in_proj_weight": "a matrix inside MultiheadAttention; only Linear layers are packed",
        "normed": "its parameters are bias, weight_g, weight_v (weight_norm, spectral_norm?)",
        "orthogonal": "it is parametrized",
        "infinite": "its weight is not finite",
        "nowhere": "its weight is on the meta device",
        "patched": "its forward was replaced on the instance",
        "head": "its weight is also that of embedding (Embedding), which stays; vocabulary_format packs both",
    }
    assert [entry for entry in tree(model) if entry[0] != "fine"] == [entry for entry in before if entry[0] != "fine"]
    printed = str(report)
    for text in ("narrow", "K = 12 is not a", "uint4b8 g32", "1 layers converted, 10 left"):
        assert text in printed


def test_report_adds_up():
    report = Report("title", bytes_before=2_500_000, bytes_after=600_000)
    report.layers = [
        LayerReport("a", "Linear", (8, 8), "uint4", 32, 2_000_000, 100_000, 0.05),
        LayerReport("b", "Linear", (8, 8), "uint4", 32, 400_000, 20_000, 0.07),
        LayerReport("c", "Linear", None, bytes_before=999, reason="why"),
    ]
    assert report.summary() == (
        "2 layers converted, 1 left; model 2.5 MB > 600 kB; 999 B of floats left (0% of what could be); error mean 6.00%, worst 7.00%"
    )
    assert (report.left_bytes, report.quantized_share) == (999, 2_400_000 / 2_400_999)
    lines = str(report).splitlines()
    assert lines[0].strip() == "title"
    assert [" ".join(line.replace("│", " ").split()) for line in lines[4:7]] == [
        "a Linear 8x8 uint4 g32 2 MB > 100 kB 5.00%",
        "b Linear 8x8 uint4 g32 400 kB > 20 kB 7.00%",
        "c Linear 999 B why",
    ]


def test_a_shared_module_is_converted_once_and_stays_shared(device):
    model = make_model(device, 2)
    model[1].up = model[0].up
    report = quantize_model(model, "uint4", 32, progress=False)
    assert [layer.name for layer in report.layers] == ["0.up", "0.down", "1.down"]
    assert isinstance(model[0].up, MarlinLinear)
    assert model[0].up is model[1].up


def test_a_shared_weight_is_quantized_once(monkeypatch, device):
    model = make_model(device, 2)
    model[1].up.weight = model[0].up.weight
    biases = [model[i].up.bias for i in range(2)]
    calls = []
    original = recipe.quantize_weight
    monkeypatch.setattr(recipe, "quantize_weight", lambda w, *args, **kw: calls.append(w) or original(w, *args, **kw))
    report = quantize_model(model, "uint4", 32, progress=False)
    assert len(calls) == 3
    assert model[0].up is not model[1].up
    assert model[0].up.b_packed is model[1].up.b_packed
    assert [model[i].up.bias for i in range(2)] == biases
    assert report.layers[0].error == report.layers[2].error


def test_a_weight_shared_with_an_excluded_layer_stays(device):
    model = make_model(device, 2)
    model[1].up.weight = model[0].up.weight
    report = quantize_model(model, "uint4", 32, exclude="1.up", progress=False)
    reasons = {layer.name: layer.reason for layer in report.left}
    assert reasons == {"0.up": "its weight is also that of 1.up (Linear), which stays"}


def test_hooks_and_their_handles_move_along(device):
    model = make_model(device, 1)
    seen = []
    handle = model[0].up.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    quantize_model(model, "uint4", 32, progress=False)
    x = torch.randn(2, 64, device=device)
    model(x)
    handle.remove()
    model(x)
    assert seen == [MarlinLinear]


def test_backward_hooks_are_called_on_the_new_layer():
    model, seen = make_model("cpu", 1), []
    handle = model[0].up.register_full_backward_hook(lambda module, before, after: seen.append(type(module)))
    quantize_model(model, "uint4", 32, progress=False)
    x = torch.randn(2, 64, requires_grad=True)
    model(x).sum().backward()
    handle.remove()
    model(x).sum().backward()
    assert seen == [MarlinLinear]


@pytest.mark.parametrize("call", [0, 3, 5])
def test_an_exception_in_the_middle_leaves_the_model_as_it_was(monkeypatch, call, device):
    model = make_model(device)
    model[2].up.weight = model[0].up.weight
    model[0].up.register_forward_hook(lambda *args: None)
    before, values = tree(model), tensors(model)
    fail_at(monkeypatch, "_relative_error" if call < 5 else "module_bytes", call)
    with pytest.raises(RuntimeError, match="injected"):
        quantize_model(model, "nvfp4", progress=False)
    assert tree(model) == before
    assert same(tensors(model), values)
    assert model[2].up.weight is model[0].up.weight
    assert len(model[0].up._forward_hooks) == 1


def test_an_exception_while_swapping_puts_the_old_layers_back(device):
    class Stubborn(nn.Sequential):
        def set_submodule(self, target, module, strict=False):
            if target == "1.down" and isinstance(module, MarlinLinear):
                raise RuntimeError("injected")
            super().set_submodule(target, module, strict)

    model = Stubborn(*make_model(device))
    before, values = tree(model), tensors(model)
    with pytest.raises(RuntimeError, match="injected"):
        quantize_model(model, "nvfp4", progress=False)
    assert tree(model) == before
    assert same(tensors(model), values)


@pytest.mark.usefixtures("new_objects")  # so that the collector looks at few objects
def test_without_atomic_each_old_layer_is_freed_before_the_next(monkeypatch, device):
    model = make_model(device)
    old = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    alive = []
    original = model_module._relative_error
    monkeypatch.setattr(
        model_module,
        "_relative_error",
        lambda *args: (gc.collect(), alive.append(sum(ref() is not None for ref in old)), original(*args))[-1],
    )
    quantize_model(model, "uint4b8", 32, progress=False, atomic=False)
    assert alive == [6, 5, 4, 3, 2, 1]


def test_errors_name_the_layer(device):
    model = make_model(device)
    model[1].down.weight.data.mul_(1e8)
    with pytest.raises(ValueError, match=r"quantize_model: layer 1.down: .*scale_dtype: the largest scale"):
        quantize_model(model, "uint4b8", 32, progress=False)
    with pytest.raises(ValueError, match=r"weight_format: expected one of uint4b8, .*got 'int4'"):
        quantize_model(model, "int4", progress=False)
    with pytest.raises(ValueError, match=r"layer 0.up: quantize_weight: group_size: expected one of .*got 40"):
        quantize_model(model, "uint4b8", 40, progress=False)
    with pytest.raises(
        ValueError, match=r"quantize_model: model: expected a model with layers inside, got the layer Linear itself"
    ):
        quantize_model(nn.Linear(8, 8), progress=False)


def test_progress_is_shown_on_request(capsys, device):
    quantize_model(make_model(device, 1), "uint4b8", 32)
    assert "quantize to uint4b8: 100%" in capsys.readouterr().err
    quantize_model(make_model(device, 1), "uint4b8", 32, progress=False)
    assert capsys.readouterr().err == ""
