"""quantize_model and replace_linear_layers: what they change, what they leave and why, and that they never do half."""

import copy
import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from reference import FORMATS
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations

from torch_marlin_metal import model as model_module
from torch_marlin_metal.linear import MarlinLinear
from torch_marlin_metal.model import quantize_model, replace_linear_layers
from torch_marlin_metal.repack import pack_awq, pack_codes, pack_gptq_zeros

DATA = Path(__file__).parents[1] / "data"


class Block(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96, device=device)
        self.down = nn.Linear(96, 64, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def make_model(device: str, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(device) for _ in range(blocks))).eval()


def tree(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)]


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("weight_format", FORMATS)
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
        ("*.up", None, {"0.up", "1.up", "2.up"}),
        (["0.*", "re:[12]\\.down"], None, {"0.up", "0.down", "1.down", "2.down"}),
        (None, ["1.*"], {"0.up", "0.down", "2.up", "2.down"}),
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
    with pytest.raises(ValueError, match=r"quantize_model: include: 'encoder.\*' fits none of the 6 layers"):
        quantize_model(model, include=["*.up", "encoder.*"], progress=False)
    with pytest.warns(UserWarning, match=r"quantize_model: exclude: 'lm_head' fits none of the 6 layers"):
        quantize_model(model, exclude="lm_head", progress=False)


def test_layers_that_stay_are_listed_with_the_reason(device):
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
    report = quantize_model(model, "uint4b8", 32, progress=False)
    assert [layer.name for layer in report.converted] == ["fine"]
    reasons = {layer.name: layer.reason for layer in report.left}
    assert reasons == {
        "narrow": "K = 12 is not a positive multiple of 8",
        "wide": "its weight is torch.float64; expected float16, bfloat16 or float32",
        "attention.out_proj": "NonDynamicallyQuantizableLinear is a subclass of nn.Linear",
        "normed": "its parameters are bias, weight_g, weight_v (weight_norm, spectral_norm?)",
        "orthogonal": "it is parametrized",
        "infinite": "its weight is not finite",
        "nowhere": "its weight is on the meta device",
        "patched": "its forward was replaced on the instance",
        "head": "its weight is also that of embedding (Embedding), which stays",
    }
    assert [entry for entry in tree(model) if entry[0] != "fine"] == [entry for entry in before if entry[0] != "fine"]
    printed = str(report)
    for text in ("narrow", "K = 12 is not a positive multiple of 8", "uint4b8 g32", "1 layers converted, 9 left"):
        assert text in printed


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
    original = model_module.quantize_weight
    monkeypatch.setattr(
        model_module, "quantize_weight", lambda w, *args, **kw: calls.append(w) or original(w, *args, **kw)
    )
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


def fail_at(monkeypatch, name: str, call: int) -> None:
    """Makes the given call of a function of the model module raise."""
    original, count = getattr(model_module, name), iter(range(1000))

    def wrapper(*args, **kw):
        if next(count) == call:
            raise RuntimeError("injected")
        return original(*args, **kw)

    monkeypatch.setattr(model_module, name, wrapper)


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


class PackedLinear(nn.Module):
    """A layer as GPTQ and AWQ packages leave it: buffers, sizes, nothing that their forward needs."""

    def __init__(self, state: dict[str, torch.Tensor], K: int, N: int, group_size: int, **attributes) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(name, tensor)
        self.in_features, self.out_features, self.bits, self.group_size = K, N, 4, group_size
        for name, value in attributes.items():
            setattr(self, name, value)


class PackedLinearV2(PackedLinear):
    """GPTQModel's classes that hold zero points of version 2 whatever the file said."""

    REQUIRES_FORMAT_V2 = True


def load_fixture(folder: str, device: str, cls: type[PackedLinear] = PackedLinear, **attributes):
    config = json.loads((DATA / folder / "config.json").read_text())
    settings = config["quantization_config"]
    state = load_file(DATA / folder / "model.safetensors")
    prefixes = {name.rpartition(".")[0] for name in state}
    assert len(prefixes) == 1
    state = {name.rpartition(".")[2]: tensor.to(device) for name, tensor in state.items()}
    (reference,) = load_file(DATA / folder / "reference.safetensors").values()
    N, K = reference.shape
    layer = cls(state, K, N, settings["group_size"], **attributes)
    model = nn.ModuleDict({"layer": layer})
    model.config = type("Config", (), {"quantization_config": settings})()
    return model, reference


GPTQ = [
    "gptq/autogptq-asym-g128",
    "gptq/autoround-asym-g64-v1-zero0",
    "gptq/autoround-sym-g32",
    "gptq/gptqmodel-asym-g64-v1",
    "gptq/gptqmodel-asym-g64-v1-zero0",
    "gptq/gptqmodel-asym-g64-v2",
    "gptq/gptqmodel-sym-g128-v1",
    "gptq/gptqmodel-sym-g32-actorder-v1",
    "gptq/gptqmodel-sym-gm1-v1",
]
AWQ = ["awq/autoawq-gemm-asym-g32", "awq/autoround-asym-g32", "awq/gptqmodel-gemm-asym-g64"]


@pytest.mark.parametrize("folder", GPTQ + AWQ)
def test_layers_of_other_programs_are_taken_over_bit_for_bit(folder, device):
    model, reference = load_fixture(folder, device)
    report = replace_linear_layers(model, progress=False)
    (entry,) = report.converted
    assert entry.error is None
    layer = model["layer"]
    assert layer.weight_format == ("uint4b8" if "-sym-" in folder else "uint4")
    assert (layer.perm is not None) == ("actorder" in folder)
    assert torch.equal(layer.dequantize().cpu().half(), reference)


@pytest.mark.parametrize("folder", GPTQ)
def test_classes_that_hold_version_2_zero_points(folder, device):
    """Such a class gets its zero points converted when it loads, and its config still says version 1."""
    model, reference = load_fixture(folder, device, PackedLinearV2)
    version = 2 if folder.endswith("v2") else 1
    if version == 1:
        model["layer"].qzeros += 0x11111111
    model["layer"].qzero_format = lambda: 1
    replace_linear_layers(model, progress=False)
    assert torch.equal(model["layer"].dequantize().cpu().half(), reference)


def test_zero_points_that_contradict_the_version_stay(device):
    model, _ = load_fixture("gptq/gptqmodel-sym-g128-v1", device, PackedLinearV2)
    (entry,) = replace_linear_layers(model, progress=False).left
    assert entry.reason == (
        "read as version 2, every zero point would be 7; as version 1, 8, which is a symmetric weight: "
        "pass checkpoint_version"
    )
    replace_linear_layers(model, checkpoint_version=1, progress=False)
    assert model["layer"].weight_format == "uint4b8"


def test_the_converted_flag_of_a_module_counts(device):
    model, reference = load_fixture("gptq/gptqmodel-asym-g64-v1", device)
    model["layer"].qzeros += 0x11111111
    model["layer"].qzero_format = lambda: 2
    replace_linear_layers(model, progress=False)
    assert torch.equal(model["layer"].dequantize().cpu().half(), reference)


def test_words_without_act_order_are_not_copied(device):
    model, _ = load_fixture("gptq/gptqmodel-sym-g128-v1", device)
    qweight, scales = model["layer"].qweight, model["layer"].scales
    replace_linear_layers(model, progress=False)
    assert model["layer"].b_packed.data_ptr() == qweight.data_ptr()
    assert model["layer"].scales.data_ptr() == scales.data_ptr()


def made_up(
    kind: str, K: int = 64, N: int = 32, group_size: int = 32, device: str = "cpu", **attributes
) -> PackedLinear:
    torch.manual_seed(1)
    G = -(-K // group_size) if group_size > 0 else 1
    codes = torch.randint(0, 16, (K, N), dtype=torch.uint8)
    zeros = torch.randint(1, 16, (G, N), dtype=torch.uint8)
    state = {"scales": torch.rand(G, N).half()}
    if kind == "gptq":
        state |= {"qweight": pack_codes(codes), "qzeros": pack_gptq_zeros(zeros, 1)}
    else:
        packed = pack_codes(codes)
        state |= {"qweight": pack_awq(packed), "qzeros": pack_gptq_zeros(zeros, 2)}
    state = {name: tensor.to(device) for name, tensor in state.items()}
    return PackedLinear(state, K, N, group_size, **attributes)


def test_square_layers_are_told_apart_by_shape(device):
    model = nn.ModuleDict({kind: made_up(kind, 64, 64, device=device) for kind in ("gptq", "awq")})
    replace_linear_layers(model, progress=False)
    assert torch.equal(model["gptq"].b_packed, model["awq"].b_packed)


def test_bias_names_and_group_sizes_of_other_packages(device):
    bias = torch.randn(32, device=device).half()
    with_bias = made_up("gptq", group_size=-1, device=device)
    with_bias.register_buffer("bias", bias)
    old_names = made_up("gptq", device=device)
    old_names.infeatures, old_names.outfeatures = old_names.in_features, old_names.out_features
    del old_names.in_features, old_names.out_features
    wide = made_up("gptq", 384, group_size=192, device=device)
    unstated = made_up("awq", device=device)
    del unstated.group_size, unstated.bits
    unstated.w_bit = 4
    model = nn.ModuleDict({"with_bias": with_bias, "old_names": old_names, "wide": wide, "unstated": unstated})
    report = replace_linear_layers(model, progress=False)
    assert not report.left
    assert torch.equal(model["with_bias"].bias, bias)
    assert [model[name].group_size for name in model] == [64, 32, 64, 32]
    assert torch.equal(model["wide"].scales, wide.scales.repeat_interleave(3, 0))


def test_layers_that_cannot_be_read_are_listed_with_the_reason(device):
    layers = {
        "fine": made_up("gptq"),
        "eight_bits": made_up("gptq", bits=8),
        "adapted": made_up("gptq", adapter=object()),
        "spread": made_up("awq", _hf_hook=object()),
        "shuffled": made_up("gptq", q_handle=1),
        "gemv": made_up("gptq", 64, 64),
        "odd": made_up("gptq"),
        "short": made_up("gptq"),
        "fast": made_up("gptq"),
        "grouped": made_up("gptq"),
        "unsorted": made_up("gptq"),
        "empty": made_up("gptq"),
        "huge": made_up("gptq"),
        "small_groups": made_up("gptq", group_size=8),
    }
    layers["gemv"].out_features = 8
    layers["gemv"].in_features = 512
    layers["odd"].qweight = torch.zeros(5, 32, dtype=torch.int32)
    layers["short"].qzeros = torch.zeros(1, 4, dtype=torch.int32)
    layers["fast"].qweight = torch.zeros(8, 64, dtype=torch.int16)
    layers["grouped"].group_size = 64
    layers["unsorted"].g_idx = torch.tensor([0] * 33 + [1] * 31)
    layers["empty"].qzeros = None
    layers["huge"].scales = torch.full((2, 32), 2.0**101)
    model = nn.ModuleDict(layers)
    before = tree(model)
    report = replace_linear_layers(model, progress=False)
    reasons = {layer.name: layer.reason for layer in report.left}
    assert reasons == {
        "eight_bits": "8 bits; the operators take 4",
        "adapted": "it has an adapter, which the new layer would lose",
        "spread": "it has an accelerate hook (weights spread over devices)",
        "shuffled": "its package has rearranged the words for its own kernel",
        "gemv": "qweight is [N, K/8] (AWQ gemv); GPTQ's [K/8, N] and AWQ gemm's [K, N/8] are read",
        "odd": "qweight [5, 32] and scales [2, 32] fit neither GPTQ nor AWQ gemm with 4 bits for N=32, K=64",
        "short": "qzeros are torch.int32 [1, 4]; expected int32 [2, 4]",
        "fast": "qweight is torch.int16 [8, 64]; expected int32 with two dimensions",
        "grouped": "2 groups for K=64 do not agree with a group size of 64",
        "unsorted": "gptq_perm: g_idx: expected 32 rows in group 0 of 2, got 33",
        "empty": "it has no qzeros",
        "huge": f"scales: expected finite values of at most 2^100, got a range of {2.0**101} to {2.0**101}",
        "small_groups": "no group size of the operators divides its groups of 8",
    }
    assert [layer.name for layer in report.converted] == ["fine"]
    assert [entry for entry in tree(model) if entry[0] != "fine"] == [entry for entry in before if entry[0] != "fine"]


def test_taking_over_is_all_or_nothing(monkeypatch, device):
    model = nn.ModuleDict({str(i): made_up(kind, device=device) for i, kind in enumerate(["gptq", "awq", "gptq"])})
    before, values = tree(model), tensors(model)
    fail_at(monkeypatch, "read_packed_linear", 2)
    with pytest.raises(RuntimeError, match="injected"):
        replace_linear_layers(model, progress=False)
    assert tree(model) == before
    assert same(tensors(model), values)


def test_replace_arguments(device):
    model = nn.ModuleDict({"a": made_up("gptq", device=device), "b": made_up("gptq", device=device)})
    with pytest.raises(ValueError, match="replace_linear_layers: checkpoint_version: expected None, 1 or 2, got 3"):
        replace_linear_layers(model, checkpoint_version=3, progress=False)
    with pytest.raises(ValueError, match="replace_linear_layers: include: 'c' fits none of the 2 layers"):
        replace_linear_layers(model, include="c", progress=False)
    report = replace_linear_layers(model, include="b", progress=False)
    assert [layer.name for layer in report.layers] == ["b"]
    assert not isinstance(model["a"], MarlinLinear)
