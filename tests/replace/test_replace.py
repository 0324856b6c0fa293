"""replace_linear_layers replaces layers of other programs bit for bit, or keeps them and states the reason."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.models import fail_at, same, tensors, tree
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models.quantize import replace_linear_layers
from torch_marlin_metal.repack import pack_awq, pack_codes, pack_gptq_zeros

DATA = Path(__file__).parents[1] / "data/layers"


class PackedLinear(nn.Module):
    """Imitates a layer of GPTQ and AWQ packages: it has the packages' buffers and sizes, but no forward."""

    def __init__(self, state: dict[str, torch.Tensor], K: int, N: int, group_size: int, **attributes) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(name, tensor)
        self.in_features, self.out_features, self.bits, self.group_size = K, N, 4, group_size
        for name, value in attributes.items():
            setattr(self, name, value)


class PackedLinearV2(PackedLinear):
    """Imitates the classes of GPTQModel that store zero points of version 2, even if the file has version 1."""

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


@pytest.mark.parametrize(
    ("folder", "bits", "weight_format"),
    [
        ("gptq/autoround-8bit-asym-g64", 8, "uint8"),
        ("gptq/autoround-8bit-sym-g32", 8, "uint8b128"),
        ("gptq_planar/gptqmodel-asym-3bit-g64", 3, "uint4"),
        ("awq/gptqmodel-gemm-8bit-asym-g64", 8, "uint8"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*AWQ of 8 bits")
def test_other_widths_are_read_as_from_a_file(folder, bits, weight_format, device):
    model, reference = load_fixture(folder, device, bits=bits)
    report = replace_linear_layers(model, progress=False)
    assert [entry.reason for entry in report.layers] == [""]
    layer = model["layer"]
    assert (layer.weight_format, layer.b_packed.device.type) == (weight_format, device)
    assert torch.equal(layer.dequantize().cpu().half(), reference.half())


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
def test_classes_that_convert_zero_points_to_version_2_are_recognized(folder, device):
    """When GPTQModel loads a file into such a class, it converts the zero points. The config still states version 1."""
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
        "every zero point is 7 by version 2, and 8 by version 1, which makes the weight symmetric: "
        "if it is, gptq_version=1 reads it"
    )
    replace_linear_layers(model, gptq_version=1, progress=False)
    assert model["layer"].weight_format == "uint4b8"


def test_a_module_that_says_its_zero_points_are_converted_is_believed(device):
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


def test_layers_that_cannot_be_read_are_listed_with_the_reason():
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
        "bytes": made_up("gptq"),
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
    layers["bytes"].qweight = layers["bytes"].qweight[:, :32].to(torch.uint8)
    layers["grouped"].group_size = 64
    layers["unsorted"].g_idx = torch.tensor([0] * 33 + [1] * 31)
    layers["empty"].qzeros = None
    layers["huge"].scales = torch.full((2, 32), 2.0**101)
    model = nn.ModuleDict(layers)
    before = tree(model)
    report = replace_linear_layers(model, progress=False)
    reasons = {layer.name: layer.reason for layer in report.left}
    assert reasons == {
        "eight_bits": "state_dict: tensor 'qweight': 4 bits by the shapes do not agree with the settings' 8",
        "adapted": "it has an adapter, which the new layer would lose",
        "spread": "it has an accelerate hook (weights spread over devices)",
        "shuffled": "its package has rearranged the words for its own kernel",
        "gemv": "state_dict: tensor 'scales': expected shape [8, any], got [2, 64]",
        "odd": "qweight [5, 32] and scales [2, 32] fit neither GPTQ nor AWQ with 4 bits for N=32, K=64",
        "short": "qzeros are torch.int32 [1, 4]; expected int32 [2, 4]",
        "fast": "state_dict: tensor 'qzeros': expected dtype F16 or BF16 or F32, got I32",
        "bytes": "qweight is torch.uint8 [8, 32]; expected int32 with two dimensions",
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
    with pytest.raises(ValueError, match="replace_linear_layers: gptq_version: expected None, 1 or 2, got 3"):
        replace_linear_layers(model, gptq_version=3, progress=False)
    with pytest.raises(ValueError, match="replace_linear_layers: include: 'c' matches none of the 2 layers"):
        replace_linear_layers(model, include="c", progress=False)
    report = replace_linear_layers(model, include="b", progress=False)
    assert [layer.name for layer in report.layers] == ["b"]
    assert not isinstance(model["a"], MarlinLinear)


@pytest.mark.parametrize("names", [("gptq_version", "gptq_zeros_rule"), ("checkpoint_version", "rule")])
def test_both_names_of_the_gptq_arguments_are_heeded(names) -> None:
    folder = "gptq/gptqmodel-asym-g64-v1-zero0"
    model, reference = load_fixture(
        folder, "cpu", PackedLinearV2
    )  # the class has version 2, but the words have version 1
    replace_linear_layers(model, **dict(zip(names, (1, "word"), strict=True)), progress=False)
    assert torch.equal(model["layer"].dequantize().half(), reference)
    masked, _ = load_fixture(folder, "cpu", PackedLinearV2)
    replace_linear_layers(masked, **dict(zip(names, (1, "masked"), strict=True)), progress=False)
    assert not torch.equal(masked["layer"].dequantize().half(), reference)
    with pytest.raises(ValueError, match="gptq_zeros_rule: expected 'word', 'masked' or 'unmasked', got 'minus'"):
        replace_linear_layers(model, **{names[1]: "minus"}, progress=False)
