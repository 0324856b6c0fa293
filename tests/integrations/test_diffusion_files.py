"""Single files of diffusion transformers, packed, from file to image, compared with diffusers' own decoded model.

Each family of models is read from a GGUF file with two types of tensors, and from files of other programs.
"""

import json
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path

import diffusers.loaders.single_file_model as single_file
import peft
import pytest
import torch
from diffusers.loaders.single_file_utils import load_single_file_checkpoint
from safetensors.torch import load_file, save_file
from torch import nn

from tests.load.test_memory import MOST, held_by, peak_of
from tests.support import diffusion_files
from tests.support.diffusion_files import (
    FAMILIES,
    PREFIX,
    Family,
    File,
    flux,
    flux_of_any_width,
    image,
    psnr,
    write_gguf,
    write_safetensors,
)
from tests.support.models import packed_layers, same
from tests.support.reference import check_gemm, to_numpy
from torch_marlin_metal import MarlinLinear, load_quantized
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.files import safetensors
from torch_marlin_metal.checkpoints.formats import gguf_blocks
from torch_marlin_metal.convert import replace_linear_layers
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.integrations.diffusers import MarlinConfig
from torch_marlin_metal.load.row_tensor import RowError
from torch_marlin_metal.models.linear_layers import ModelMismatchError

diffusers = diffusion_files.diffusers
pytestmark = pytest.mark.filterwarnings("ignore")
FILES = {
    "flux": [("Q4_K", "Q6_K"), "comfy"],
    "sd3": [("Q8_0", "Q5_1"), "fp8r"],
    "qwen": [("Q4_0", "IQ4_XS"), "rounded"],
    "wan": [("Q5_K", "Q3_K"), "comfy"],
    "ltx": [("Q4_1", "Q2_K"), "nvfp4", "comfy_nvfp4", "comfy_mxfp8"],
}
CASES = [(name, kind) for name, kinds in FILES.items() for kind in kinds]
LEAST = 100  # the minimum PSNR in dB, for two steps in fp32


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with flux_of_any_width():
        yield


def write(folder, name: str, kind) -> tuple[Family, File]:
    family = FAMILIES[name]
    if isinstance(kind, tuple):
        return family, write_gguf(folder, family, kind)
    return family, write_safetensors(folder, family, kind, PREFIX if kind == "comfy" else "")


def by_single_file(family: Family, file: File, **more) -> nn.Module:
    return family.cls.from_single_file(str(file.path), config=str(file.config), **more)


class Checked:
    """Compares every product of a model's packed layers with fp64, within the error of fp32."""

    def __init__(self, model: nn.Module, exact: nn.Module) -> None:
        self.products = 0
        for name, layer in packed_layers(model).items():
            layer.register_forward_hook(self._check(exact.get_submodule(name), layer))

    def _check(self, exact: nn.Linear, layer: MarlinLinear):
        weight, bias = to_numpy(exact.weight.detach()).T, to_numpy(exact.bias.detach())
        held, offset = layer.to_packed().one_level(), WEIGHT_FORMATS[layer.weight_format].fixed_offset
        most = abs(weight)  # the loop below adds the offset that a kernel adds and later subtracts
        for factor, values in ((offset, held.scales), (1, held.zeros)):
            if factor and values is not None:
                spread = values.cpu().float().repeat_interleave(layer.group_size, 0)[: layer.in_features]
                most = most + 2 * factor * abs(to_numpy(spread))

        def check(layer: MarlinLinear, given: tuple, result: torch.Tensor) -> None:
            rows = to_numpy(given[0].cpu())
            bound = 2.0**-24 * (16 * (abs(rows) @ most + abs(bias)) + abs(rows @ weight + bias)) + 1e-38
            check_gemm(result.cpu(), rows @ weight + bias, bound)
            self.products += 1

        return check


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_file_stays_packed_at_both_entry_points(name, kind, tmp_path) -> None:
    family, file = write(tmp_path, name, kind)
    exact = file.reference(family)
    given = diffusers.GGUFQuantizationConfig() if isinstance(kind, tuple) else None
    model = by_single_file(family, file, quantization_config=given)
    other = family.model().eval()
    report = load_quantized(other, file.path, progress=False)
    kept = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    wide = {f"condition_embedder.time_embedder.linear_{i}" for i in (1, 2)}  # diffusers keeps these layers in fp32
    assert kept == {"wan": wide, "flux": {"x_embedder"} if given is not None else set()}.get(name, set())
    assert packed_layers(other).keys() - packed_layers(model).keys() == kept & wide
    assert len(packed_layers(other)) == sum(not entry.reason for entry in report.layers)
    for own, layer in packed_layers(other).items():
        assert torch.equal(layer.dequantize(), exact.get_submodule(own).weight), own
    for own, layer in packed_layers(model).items():
        assert same(layer.state_dict(), other.get_submodule(own).state_dict()), own
    checked = Checked(model, exact)
    got, want = image(family, model), image(family, exact)
    assert checked.products >= 2 * len(packed_layers(model)) - 2
    assert psnr(got, want) > LEAST
    if wide & kept:
        assert psnr(image(family, other), want) > LEAST


ON_MPS = {"flux": "comfy", "sd3": "fp8r", "qwen": "rounded", "wan": ("Q5_K", "Q3_K"), "ltx": "comfy_nvfp4"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*one, marks=[] if one[0] in ("qwen", "ltx") else pytest.mark.whole) for one in ON_MPS.items()],
)
def test_a_file_makes_the_image_on_mps(name, kind, tmp_path, mps) -> None:
    family, file = write(tmp_path, name, kind)
    exact = file.reference(family)
    model = by_single_file(family, file, device=mps)
    checked = Checked(model, exact)
    assert psnr(image(family, model, mps), image(family, exact)) > LEAST
    assert checked.products


EVERY = [*dict.fromkeys(kind for kinds in FILES.values() for kind in kinds)]


@pytest.mark.whole
@pytest.mark.parametrize("where", ["cpu", "mps"])
@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind if isinstance(kind, str) else "-".join(kind))
@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_of_every_family_makes_the_image(name, kind, where, tmp_path, request) -> None:
    family, file = write(tmp_path, name, kind)
    exact = file.reference(family)
    device = request.getfixturevalue("mps") if where == "mps" else "cpu"
    model = by_single_file(family, file).to(device)
    checked = Checked(model, exact)
    quality = psnr(image(family, model, device), image(family, exact))
    print(f"{name}, {kind}, {where}: {checked.products} products in the bound, PSNR {quality:.0f} dB")
    assert quality > LEAST
    assert checked.products


def test_layers_of_diffusers_are_taken_over_in_memory(tmp_path) -> None:
    family, file = write(tmp_path, "wan", ("Q4_K", "Q6_K", "Q2_K", "Q5_0", "IQ4_NL"))
    config = diffusers.GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
    state = load_single_file_checkpoint(str(file.path))  # from tensors in memory, diffusers creates its own layers
    model = family.cls.from_single_file(state, config=str(file.config), quantization_config=config)
    theirs = {n: m for n, m in model.named_modules() if type(m).__name__ == "GGUFLinear"}
    report = replace_linear_layers(model, progress=False)
    assert len(theirs) == 14 == len(packed_layers(model)) == len(report.layers)
    at_loading = by_single_file(family, file, quantization_config=config)
    for name, layer in packed_layers(model).items():
        own = packed_layers(at_loading)[name]
        assert layer.weight.dtype == own.weight.dtype == torch.bfloat16
        assert torch.equal(layer.dequantize(), own.dequantize())
    assert at_loading.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32


def test_a_layer_of_bf16_in_a_gguf_file_is_reported(tmp_path) -> None:
    layer = diffusers.quantizers.gguf.utils.GGUFLinear(8, 4)
    kind = diffusion_files.gguf.GGMLQuantizationType.BF16
    layer.weight = diffusers.quantizers.gguf.utils.GGUFParameter(torch.zeros(4, 16, dtype=torch.uint8), quant_type=kind)
    (entry,) = replace_linear_layers(nn.Sequential(layer), progress=False).layers
    assert entry.reason.startswith("its weight is BF16; read are Q4_0")


DIRECTORIES = {
    "quanto int8": (torch.int8, 127, ("weight._data", "weight._scale"), {"quant_method": "quanto"}, {}),
    "quanto float8": (torch.float8_e4m3fn, 448, ("weight._data", "weight._scale"), {"quant_method": "quanto"}, {}),
    "torchao int8": (
        torch.int8, 127, ("weight.qdata", "weight.scale"), {"quant_method": "torchao"},
        {"tensor_attributes": {"class": "Int8Tensor"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_directories_of_quanto_and_torchao_are_packed_by_load_quantized(kind, tmp_path) -> None:
    dtype, most, names, settings, more = DIRECTORIES[kind]
    family = FAMILIES["ltx"]
    torch.manual_seed(0)
    exact, state = family.model().eval(), {}
    linear = {name for name, module in exact.named_modules() if isinstance(module, nn.Linear)}
    for name, tensor in exact.state_dict().items():
        base = name.removesuffix(".weight")
        if base == name or base not in linear:
            state[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True) / most
        codes = tensor / scale
        codes = (codes if dtype.is_floating_point else codes.round()).to(dtype)
        state |= {f"{base}.{names[0]}": codes, f"{base}.{names[1]}": scale}
        tensor.copy_(codes.float() * scale)
    exact.save_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings} | more
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    model = family.model().eval()
    load_quantized(model, tmp_path, progress=False)
    assert packed_layers(model).keys() == linear
    assert psnr(image(family, model), image(family, exact)) > LEAST


@pytest.mark.parametrize("kind", [("Q4_K",), ("Q8_0",), "comfy"])
def test_memory_is_that_of_the_file(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gguf_blocks, "PIECE_BYTES", 1 << 15)  # as small a part of this model as of a real one
    monkeypatch.setattr(safetensors, "POOLED_BYTES", 1 << 40)
    settings = FAMILIES["flux"].settings | {"num_single_layers": 6}
    monkeypatch.setitem(FAMILIES, "flux", replace(FAMILIES["flux"], settings=settings, shapes=partial(flux, 6)))
    family, file = write(tmp_path, "flux", kind)
    dtype = torch.float32 if isinstance(kind, tuple) else torch.bfloat16
    by_single_file(family, file, torch_dtype=dtype)  # allocates what is created once and kept
    made = []
    peak = peak_of(lambda: made.append(by_single_file(family, file, torch_dtype=dtype)))
    assert held_by(made[0]) <= 1.03 * file.path.stat().st_size
    assert held_by(made[0]) <= peak < MOST * held_by(made[0])


def test_modules_that_are_not_converted_become_floats(tmp_path) -> None:
    family, file = write(tmp_path, "ltx", "comfy")
    config = MarlinConfig(modules_to_not_convert=["proj_out", "transformer_blocks.0.ff"])
    model = by_single_file(family, file, quantization_config=config, torch_dtype=torch.bfloat16)
    exact = file.reference(family)
    assert torch.equal(model.proj_out.weight, exact.proj_out.weight.bfloat16())
    assert not any(".ff." in name for name in packed_layers(model))
    with pytest.raises(ValueError, match="from_single_file: modules_to_not_convert: 'nothing' matches none"):
        by_single_file(family, file, quantization_config=MarlinConfig(modules_to_not_convert=["nothing"]))


def test_a_packed_model_of_a_file_is_saved_and_loads_the_same_bits(tmp_path) -> None:
    family, file = write(tmp_path, "wan", ("Q4_K", "Q8_0"))
    model = by_single_file(family, file)
    model.save_pretrained(tmp_path / "saved")
    again = family.cls.from_pretrained(tmp_path / "saved")
    assert len(packed_layers(again)) == len(packed_layers(model)) == 14
    assert same(again.state_dict(), model.state_dict())


def test_a_file_of_floats_is_quantized_while_it_loads(tmp_path) -> None:
    family, file = write(tmp_path, "ltx", "rounded")
    floats = {name: tensor.contiguous() for name, tensor in file.decoded.items()}
    diffusion_files.save_file(floats, file.path)
    model = by_single_file(family, file, quantization_config=MarlinConfig("uint4", 32))
    assert {layer.weight_format for layer in packed_layers(model).values()} == {"uint4"}
    assert len(packed_layers(model)) == 17
    assert not packed_layers(by_single_file(family, file))


def test_a_conversion_of_columns_is_refused_or_left_to_diffusers(tmp_path, monkeypatch, caplog) -> None:
    family, file = write(tmp_path, "ltx", ("Q8_0",))
    known = single_file.SINGLE_FILE_LOADABLE_CLASSES["LTXVideoTransformer3DModel"]
    original = known["checkpoint_mapping_fn"]

    def in_columns(checkpoint, **more):
        made = original(checkpoint, **more)
        return made | {"proj_out.weight": made["proj_out.weight"].flip(1)}

    monkeypatch.setitem(known, "checkpoint_mapping_fn", in_columns)
    with pytest.raises(RowError, match=r"aten.flip.default of packed weights \[64, 256\]: expected a choice of rows"):
        by_single_file(family, file)
    with pytest.raises(ModelMismatchError, match=r"expected names and shapes of a LTXVideo.*fails with RowError"):
        load_quantized(family.model(), file.path, progress=False)
    diffusers.utils.logging.enable_propagation()
    try:
        theirs = by_single_file(family, file, quantization_config=diffusers.GGUFQuantizationConfig())
    finally:
        diffusers.utils.logging.disable_propagation()
    assert type(theirs.proj_out).__name__ == "GGUFLinear"
    assert "without torch_marlin_metal, because: aten.flip" in caplog.text


def test_a_file_of_another_class_and_a_damaged_one_are_named(tmp_path) -> None:
    _, file = write(tmp_path, "ltx", "comfy")
    with pytest.raises(ModelMismatchError, match=r"expected names and shapes of a SD3Transformer2DModel: diffusers' "):
        load_quantized(FAMILIES["sd3"].model(), file.path, progress=False)
    file.path.write_bytes(file.path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        by_single_file(FAMILIES["ltx"], file, quantization_config=MarlinConfig())


@pytest.mark.parametrize("lost", ["blocks.0.ffn.net.2.weight", "scale_shift_table"])
@pytest.mark.parametrize("kind", ["comfy", None])
def test_a_file_that_lacks_a_tensor_is_an_error_that_names_it(lost, kind, tmp_path) -> None:
    family, file = write(tmp_path, "wan", "comfy")
    original = {"blocks.0.ffn.net.2.weight": "blocks.0.ffn.2.", "scale_shift_table": "head.modulation"}[lost]
    tensors = {name: value for name, value in load_file(file.path).items() if original not in name}
    if kind is None:
        tensors = {name: value.contiguous() for name, value in file.decoded.items() if original not in name}
    save_file(tensors, file.path)
    with pytest.raises(CheckpointError, match=rf"from_single_file: .*no tensor for '{lost}'.* WanTransformer3DModel"):
        by_single_file(family, file, quantization_config=MarlinConfig("uint4", 32))


@pytest.mark.parametrize("ending", [".weight_scale_inv", ".scale", "_scales"])
def test_scales_of_an_unknown_name_are_an_error(ending, tmp_path) -> None:
    family, file = write(tmp_path, "wan", "comfy")
    tensors = {name.replace(".scale_weight", ending): value for name, value in load_file(file.path).items()}
    tensors.pop(f"{PREFIX}scaled_fp8", None)
    save_file(tensors, file.path)
    for entry_point in (
        lambda: by_single_file(family, file, quantization_config=MarlinConfig()),
        lambda: load_quantized(family.model(), file.path, progress=False),
    ):
        with pytest.raises(
            CheckpointError, match=rf"{ending}': the scales of .*\.weight are read under names that end"
        ):
            entry_point()


def test_adapters_of_diffusers_go_on_packed_layers_and_off_again(tmp_path) -> None:
    family, file = write(tmp_path, "flux", ("Q4_K", "Q8_0"))
    model, exact = by_single_file(family, file), file.reference(family)
    before = image(family, model)
    targets = ["to_q", "proj_mlp", "ff.net.2"]
    torch.manual_seed(0)
    exact.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    weights = peft.get_peft_model_state_dict(exact)
    model.load_lora_adapter({f"transformer.{name}": value for name, value in weights.items()}, prefix="transformer")
    changed = image(family, model)
    assert psnr(changed, image(family, exact)) > LEAST
    assert psnr(changed, before) < 40
    model.fuse_lora()
    assert 30 < psnr(image(family, model), changed) < LEAST
    model.unfuse_lora()
    assert torch.equal(image(family, model), changed)
    model.unload_lora()
    assert torch.equal(image(family, model), before)
    with pytest.raises(AttributeError, match=r"got the weight of a packed .* layer"):
        model.fuse_qkv_projections()


def test_layerwise_casting_and_compiled_blocks_leave_packed_layers(tmp_path) -> None:
    family, file = write(tmp_path, "flux", ("Q4_K", "Q8_0"))
    model, cast = by_single_file(family, file), by_single_file(family, file)
    held = {name: layer.state_dict() for name, layer in packed_layers(model).items()}
    want = image(family, model)
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    assert psnr(image(family, model), want) > LEAST
    cast.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert cast.x_embedder.weight.dtype == torch.float8_e4m3fn
    assert packed_layers(cast).keys() == held.keys()
    assert all(same(layer.state_dict(), held[name]) for name, layer in packed_layers(cast).items())
    assert 30 < psnr(image(family, cast), want) < LEAST


def test_the_example_makes_an_image(capsys) -> None:
    program = runpy.run_path(str(Path(__file__).parents[2] / "examples/diffusion.py"))
    made = program["main"]([])
    assert "28 packed layers" in capsys.readouterr().out
    assert made.shape == (32, 32, 3)
    assert made.min() >= 0
    assert made.max() <= 1
    assert made.std() > 0.001
