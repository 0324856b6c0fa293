"""Tests replace_linear_layers on layers of other packages. test_replace.py tests layers of GPTQ and of AWQ's gemm.

If the package is installed, a test uses the package's own class. Otherwise it uses a class of the same name, with a
state_dict from a checkpoint that the package wrote.
"""

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.models import tree
from torch_marlin_metal import MarlinLinear
from torch_marlin_metal.convert import replace_linear_layers

DATA = Path(__file__).parents[1] / "data/layers"


def stored(folder: str) -> tuple[dict[str, torch.Tensor], dict, torch.Tensor]:
    """Returns a fixture's tensors by their name in the layer, its settings, and the producer's own weight `[N, K]`."""
    state = load_file(DATA / folder / "model.safetensors")
    ((name, reference),) = load_file(DATA / folder / "reference.safetensors").items()
    prefix = name.removesuffix("weight")
    settings = json.loads((DATA / folder / "config.json").read_text()).get("quantization_config", {})
    return {key.removeprefix(prefix): tensor for key, tensor in state.items()}, settings, reference


class Holder(nn.Module):
    """Imitates another package's layer: it has the layer's buffers and sizes, but no forward."""

    def __init__(self, state: dict[str, torch.Tensor], shape: torch.Size, **attributes) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(name, tensor)
        self.out_features, self.in_features = shape
        for name, value in attributes.items():
            setattr(self, name, value)


class WQLinear_GEMV(Holder):  # noqa: N801  the package's name
    pass


class WQLinear_GEMVFast(Holder):  # noqa: N801
    pass


class MetalLinear(Holder):
    pass


class Linear4bit(nn.Module):
    """Imitates bitsandbytes' layer: the quant_state of its weight contains everything else."""

    def __init__(self, state: dict[str, torch.Tensor], shape: torch.Size) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.weight = nn.Parameter(state["weight"], requires_grad=False)
        self.bias = nn.Parameter(state["bias"], requires_grad=False) if "bias" in state else None
        (text,) = (tensor for name, tensor in state.items() if "bitsandbytes__" in name)
        stated = json.loads(text.numpy().tobytes())
        nested = "nested_offset" in stated
        self.weight.quant_state = SimpleNamespace(
            **{name: stated[name] for name in ("shape", "blocksize", "quant_type")},
            dtype=torch.bfloat16,
            absmax=state["weight.absmax"],
            code=state["weight.quant_map"],
            nested=nested,
            offset=torch.tensor(stated["nested_offset"]) if nested else None,
            state2=SimpleNamespace(
                absmax=state["weight.nested_absmax"],
                code=state["weight.nested_quant_map"],
                blocksize=stated["nested_blocksize"],
            )
            if nested
            else None,
        )
        self.compute_dtype = None


class HQQLinear(nn.Module):
    """Imitates hqq's layer, which has the parameter W_q and a dictionary with everything else."""

    def __init__(self, state: dict[str, torch.Tensor], shape: torch.Size, settings: dict) -> None:
        super().__init__()
        self.W_q = nn.Parameter(state["W_q"], requires_grad=False)
        self.bias = state.get("bias")
        stated = settings["quant_config"]["weight_quant_params"]
        self.meta = {name: stated[name] for name in ("nbits", "axis", "group_size")}
        self.meta |= {"shape": shape, "scale": state["scale"], "zero": state["zero"], "packing": "4bit_u8"}
        self.compute_dtype = torch.float16


def compressed(state: dict[str, torch.Tensor], shape: torch.Size, settings: dict) -> nn.Linear:
    """Returns a layer as compressed-tensors leaves it: an nn.Linear without a weight."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    del layer.weight
    for name, tensor in state.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    stated = settings["config_groups"]["group_0"]["weights"]
    weights = SimpleNamespace(num_bits=stated["num_bits"], group_size=stated["group_size"])
    layer.quantization_scheme = SimpleNamespace(weights=weights)
    return layer


def make(folder: str) -> tuple[nn.Module, torch.Tensor]:
    state, settings, reference = stored(folder)
    shape = reference.shape
    producer = folder.partition("/")[0]
    if producer == "awq":
        cls = WQLinear_GEMVFast if "gemv_fast" in folder else WQLinear_GEMV
        return cls(state, shape, w_bit=4, group_size=settings["group_size"]), reference
    if producer == "bitsandbytes":
        return Linear4bit(state, shape), reference
    if producer == "hqq":
        return HQQLinear(state, shape, settings), reference
    if producer == "mlx":
        settings = json.loads((DATA / folder / "config.json").read_text())["quantization"]
        if "biases" in state:
            state["qbiases"] = state.pop("biases")
        attributes = {"bits": 4, "group_size": settings["group_size"], "mode": settings.get("mode", "affine")}
        return MetalLinear(state, shape, **attributes), reference
    return compressed(state, shape, settings), reference


FORMATS = {
    "awq/autoawq-gemv-asym-g64": "uint4",
    "awq/autoawq-gemv_fast-asym-g64": "uint4",
    "bitsandbytes/fp4": "lut4",
    "bitsandbytes/nf4": "lut4",
    "bitsandbytes/nf4-doublequant": "lut4",
    "compressed-tensors/gptq-int4-sym-g32-static": "uint4b8",
    "compressed-tensors/int4-asym-g64": "uint4",
    "compressed-tensors/int4-sym-channel": "uint4b8",
    "compressed-tensors/mxfp4": "mxfp4",
    "compressed-tensors/nvfp4": "nvfp4",
    "hqq/axis1-g64-float16": "uint4",
    "mlx/affine-g32-float16": "uint4_bias",
    "mlx/affine-g64-bfloat16": "uint4_bias",
    "mlx/mxfp4-g32-bfloat16": "mxfp4",
    "mlx/nvfp4-g16-bfloat16": "nvfp4",
}


@pytest.mark.parametrize("folder", FORMATS)
def test_layers_in_the_state_of_other_packages(folder, device):
    layer, reference = make(folder)
    bias = None if getattr(layer, "bias", None) is None else layer.bias.detach().clone()
    model = nn.ModuleDict({"layer": layer.to(device), "other": nn.Linear(8, 8, device=device)})
    other = model["other"]
    report = replace_linear_layers(model, progress=False)
    assert [(entry.name, entry.reason) for entry in report.layers] == [("layer", "")]
    new = model["layer"]
    assert isinstance(new, MarlinLinear)
    assert (new.weight_format, new.b_packed.device.type) == (FORMATS[folder], device)
    assert torch.equal(new.dequantize().cpu().half(), reference)
    assert (new.bias is None) == (bias is None)
    if bias is not None:
        assert torch.equal(new.bias.cpu(), bias)
    assert model["other"] is other


def test_bitsandbytes_layers_that_ran_on_a_cpu():
    """On some CPUs, a forward packs 32 rows together and stores the scales as bf16 `[blocks, N]`."""
    torch.manual_seed(0)
    N, K = 64, 128
    codes, lut = torch.randint(0, 16, (N, K), dtype=torch.uint8), torch.linspace(-1, 1, 16)
    absmax = torch.rand(N, K // 64).bfloat16()
    packed = []
    for block in range(N // 32):
        for pair in range(K // 2):
            values = codes[32 * block : 32 * block + 32, 2 * pair : 2 * pair + 2].reshape(-1)
            packed.append(values[:32] | (values[32:] << 4))
    layer = make("bitsandbytes/nf4")[0]
    layer.in_features, layer.out_features, layer.bias = K, N, None
    state = SimpleNamespace(**vars(layer.weight.quant_state) | {"shape": (N, K), "code": lut})
    state.absmax, state.packing_format_for_cpu = absmax.t().contiguous(), True
    layer.weight = nn.Parameter(torch.stack(packed).reshape(N, K // 2), requires_grad=False)
    layer.weight.quant_state = state
    model = nn.ModuleDict({"layer": layer})
    assert not replace_linear_layers(model, progress=False).left
    expected = lut[codes.long()] * absmax.float().repeat_interleave(64, 1)
    assert torch.equal(model["layer"].dequantize(), expected)


def test_uint32_words():
    """transformers stores MLX's words as uint32. The same words read from a safetensors file are int32."""
    layer, reference = make("mlx/affine-g64-bfloat16")
    layer.weight = layer.weight.view(torch.uint32)
    model = nn.ModuleDict({"layer": layer})
    replace_linear_layers(model, progress=False)
    assert torch.equal(model["layer"].dequantize().half(), reference)
    assert model["layer"].weight.dtype == torch.bfloat16


def test_what_cannot_be_taken_over_is_named():
    layers = {
        "fine": make("bitsandbytes/nf4")[0],
        "empty": make("bitsandbytes/nf4")[0],
        "broken": make("compressed-tensors/int4-asym-g64")[0],
        "along_n": make("hqq/axis1-g64-float16")[0],
        "three_bits": make("mlx/affine-g64-bfloat16")[0],
        "wrong_words": make("awq/autoawq-gemv-asym-g64")[0],
    }
    layers["empty"].weight.quant_state = None
    layers["broken"].weight_scale.data[0, 0] = torch.nan
    layers["along_n"].meta["axis"] = 0
    layers["three_bits"].bits = 3
    layers["wrong_words"].scales = layers["wrong_words"].scales[:8]
    model = nn.ModuleDict(layers)
    before = tree(model)
    reasons = {entry.name: entry.reason for entry in replace_linear_layers(model, progress=False).left}
    assert reasons == {
        "empty": "its weight is not quantized yet: bitsandbytes does that when the layer is moved",
        "broken": "scales: expected finite values of at most 2^100, got a range of nan to nan",
        "along_n": "its groups run along N (axis=0), the operators' along K (axis=1)",
        "three_bits": "state_dict: tensor 'weight': 32 words of 3 bits are not rows of whole groups of 64",
        "wrong_words": "state_dict: tensor 'scales': expected shape [48, any], got [8, 16]",
    }
    assert [entry for entry in tree(model) if entry[0] != "fine"] == [entry for entry in before if entry[0] != "fine"]


def test_excluded_and_tied_layers_are_left_alone():
    first, _ = make("compressed-tensors/int4-asym-g64")
    tied, _ = make("mlx/affine-g64-bfloat16")
    twice, _ = make("hqq/axis1-g64-float16")
    embedding = nn.Embedding(4, 4)
    embedding.register_buffer("codes", tied.weight)
    model = nn.ModuleDict({"lm_head": first, "embed": embedding, "tied": tied, "one": twice, "other_name": twice})
    report = replace_linear_layers(model, exclude="lm_head", progress=False)
    assert {entry.name: entry.reason for entry in report.layers} == {
        "tied": "a tensor of its weight is also that of embed (Embedding), which stays",
        "one": "",
    }
    assert model["lm_head"] is first
    assert model["tied"] is tied
    assert model["one"] is model["other_name"]


@pytest.mark.usefixtures("new_objects")  # so that the collector looks at few objects
def test_old_tensors_are_freed_one_layer_at_a_time():
    model = nn.ModuleDict({str(i): make("bitsandbytes/nf4")[0] for i in range(3)})
    old = [weakref.ref(layer.weight) for layer in model.values()]
    alive = []

    original = nn.Module.set_submodule

    def counting(self, *arguments, **options):
        original(self, *arguments, **options)
        gc.collect()
        alive.append(sum(reference() is not None for reference in old))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "set_submodule", counting)
        replace_linear_layers(model, progress=False, atomic=False)
    assert alive[-1] <= 1  # the loop variable still refers to the last layer
    assert alive == sorted(alive, reverse=True)
    gc.collect()
    assert not [reference for reference in old if reference() is not None]


def test_transformers_metal_linear():
    """The test uses transformers' own class, of which only the forward needs a Mac."""
    metal = pytest.importorskip(
        "transformers.integrations.metal_quantization", reason="transformers is an optional extra"
    )
    state, _, reference = stored("mlx/affine-g64-bfloat16")
    N, K = reference.shape
    layer = metal.MetalLinear(K, N, bias=True, bits=4, group_size=64)
    layer.weight.data = state["weight"].view(torch.uint32)
    layer.scales.data, layer.qbiases.data = state["scales"], state["biases"]
    model = nn.ModuleDict({"layer": layer})
    assert not replace_linear_layers(model, progress=False).left
    assert torch.equal(model["layer"].dequantize().half(), reference)
