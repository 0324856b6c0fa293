"""A tiny model of a random family, partly packed, saved in a random format, and loaded through a random entry point."""

import copy
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.journeys.architectures import class_of, inputs_of, run, shrunken
from torch_marlin_metal import PackedWeight, convert, load_quantized, quantize_weight
from torch_marlin_metal.checkpoints.formats.native import NativeExporter
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.layers.float_experts import PARTS, is_experts, stores_transposed
from torch_marlin_metal.models.experts import ExpertLayers
from torch_marlin_metal.models.linear_layers import is_linear, is_transposed
from torch_marlin_metal.models.reasons import taken_weights

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "minicpm3", "vaultgemma", "phi", "phi3", "gpt2", "gpt_neox",
    "opt", "bloom", "falcon", "stablelm", "starcoder2", "granite", "olmo2", "cohere", "bert", "roberta", "electra",
    "t5", "bart", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "mamba", "mpt",
    "biogpt", "smollm3", "gemma3",
)  # fmt: skip
FORMATS = {
    "native": ("uint4b8", "uint4", "nvfp4", "mxfp4", "lut4", "uint4_bias"),
    "gptq": ("uint4b8", "uint4"),
    "awq": ("uint4",),
    "compressed-tensors": ("uint4b8", "nvfp4"),
}
ENTRY_POINTS = ("from_pretrained", "load_quantized", "load_quantized, meta")
PREFIXES = ("", "", "", "module.", "_orig_mod.")


def case(rng: random.Random, work: Path) -> str:
    """Creates and loads one model. Returns "right" or the reason of a refusal; raises if the loaded model is wrong."""
    family, target, entry_point = rng.choice(FAMILIES), rng.choice(sorted(FORMATS)), rng.choice(ENTRY_POINTS)
    torch.manual_seed(rng.randrange(1 << 30))
    model = class_of(family)(shrunken(family)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers initializes biases to 0
                parameter.normal_(std=0.05)
    exact = copy.deepcopy(model)
    layers = pack_some(rng, exact, target)
    prefix = rng.choice(PREFIXES)
    state = [(prefix + name, value) for name, value in others(model, layers)]
    excluded = [rng.choice(layers).name] if rng.random() < 0.2 else []
    for layer in layers:
        layer.name = prefix + layer.name
    try:
        write(work / "saved", target, layers, state, json.loads(model.config.to_json_string()))
        loaded = load(entry_point, model, work / "saved", rng.choice(("error", "dequantize")), excluded)
    except convert.UnsupportedFormat:
        return "refused by the format"
    except ValueError as error:
        if "has a forward of its own" not in str(error):
            raise
        return "refused: a table with a forward of its own"
    compare(exact, loaded.eval(), f"{family}, {target}, {entry_point}, prefix {prefix!r}, exclude {excluded}")
    return f"right, {entry_point}"


def others(model: Any, layers: list[PackedWeight]) -> list[tuple[str, torch.Tensor]]:
    """Returns the model's tensors, except those of these layers, under their names in a checkpoint."""
    gone = {f"{layer.name}.{key}" for layer in layers for key in ("weight", "bias")} | set(model.all_tied_weights_keys)
    gone |= {layer.name.rsplit(".", 2)[0] + end for layer in layers for end in (".gate_up_proj", ".down_proj")}
    gone |= {f"{name}_bias" for name in gone if name.endswith("_proj")}
    gone |= {layer.name.rpartition(".")[0] for layer in layers}
    gone |= {f"{layer.name.rpartition('.')[0]}_bias" for layer in layers}
    return [(name, value) for name, value in model.state_dict().items() if name not in gone]


def pack_some(rng: random.Random, exact: Any, target: str) -> list[PackedWeight]:
    """Packs some layers of a model, and sets the model's weights to the decoded values."""
    layers = []
    for bias, name, weight in chosen(rng, exact):
        layers.append(packed(rng, target, name, weight))
        with torch.no_grad():
            weight.copy_(layers[-1].dequantize().T)
            layers[-1].bias = None if bias is None else bias.detach().clone()
    return layers


def chosen(rng: random.Random, model: Any) -> Iterator[tuple[torch.Tensor | None, str, torch.Tensor]]:
    """Yields some layers of a model: the bias, the name in a checkpoint, and a view `[N, K]` of the weight."""
    share, some = rng.choice((0.3, 0.7, 1.0)), False
    taken = taken_weights(model)
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    tied = getattr(model, "all_tied_weights_keys", {})
    ties = {*tied, *tied.values()}
    for name, module in model.named_modules():
        if is_experts(module):
            if rng.random() < share:
                yield from experts_of(rng, name, module)
                some = True
            continue
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or (f"{name}.weight" in ties and module is not table):
            continue
        if not (module is table or is_linear(module)) or id(module) in taken or type(module).__name__ == "Router":
            continue
        view = weight.detach().T if is_transposed(module) else weight.detach()
        wanted = 0.4 if module is table else share
        if view.shape[1] % 32 == 0 and view.shape[0] % 8 == 0 and (rng.random() < wanted or not some):
            some = some or module is not table
            yield module._parameters.get("bias"), name, view


def experts_of(rng: random.Random, prefix: str, module: Any) -> Iterator[tuple[torch.Tensor | None, str, torch.Tensor]]:
    stored = {name: getattr(module, name).detach() for name in ("gate_up_proj", "down_proj")}
    views = {name: stack.mT if stores_transposed(module) else stack for name, stack in stored.items()}
    joined = getattr(module, "is_concatenated", True) and "gate_up_proj_bias" not in module._parameters
    layers = ExpertLayers.of(module, rng.choice(PARTS) if joined and rng.random() < 0.7 else ())
    for index in range(layers.count):
        gate_up, (down,) = layers.names(index)
        for name, part in zip(gate_up, views["gate_up_proj"][index].chunk(len(gate_up)), strict=True):
            bias = getattr(module, "gate_up_proj_bias", None)  # with this bias, gate and up are one layer
            yield None if bias is None else bias[index], f"{prefix}.{name}", part
        bias = getattr(module, "down_proj_bias", None)
        yield None if bias is None else bias[index], f"{prefix}.{down}", views["down_proj"][index]


def packed(rng: random.Random, target: str, name: str, weight: torch.Tensor) -> PackedWeight:
    weight_format = FORMATS[target][0 if ".experts." in name else rng.randrange(len(FORMATS[target]))]
    size = None if weight_format in ("nvfp4", "mxfp4") else 32
    layer = quantize_weight(weight.contiguous(), weight_format, size)
    layer.name = name
    return layer


def write(
    path: Path,
    target: str,
    layers: list[PackedWeight],
    others: list[tuple[str, torch.Tensor]],
    config: Any,
    file: str = "model.safetensors",
) -> None:
    if target != "native":
        options = {"version": 2} if target == "gptq" else {}
        convert.export_checkpoint(layers, path, target, other_tensors=others, config=config, **options)
        return
    exporter, state = NativeExporter(), {name: value.clone() for name, value in others}
    for layer in layers:
        state |= {f"{layer.name}.{key}": value for key, value in exporter.own_tensors(layer, layer.name).items()}
    path.mkdir()
    save_file(state, path / file, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": exporter.settings()}))


def load(entry_point: str, model: Any, path: Path, on_unsupported: Any, excluded: list[str]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if entry_point == "from_pretrained":
            config = MarlinConfig(on_unsupported=on_unsupported, modules_to_not_convert=excluded)
            return type(model).from_pretrained(path, quantization_config=config, dtype=torch.float32)
        if entry_point.endswith("meta"):
            with torch.device("meta"):
                model = type(model)(model.config)
        load_quantized(model, path, on_unsupported=on_unsupported, exclude=excluded, progress=False)
        return model


Runs = Callable[[Any, dict[str, torch.Tensor]], list[torch.Tensor]]


def compare(
    exact: Any, loaded: Any, what: str, inputs: Callable[[Any], dict[str, torch.Tensor]] = inputs_of, runs: Runs = run
) -> None:
    """Compares the outputs with those of the decoded model in fp64. One of two inputs must give the same outputs.

    For the other input, a router may choose other experts, because two of its scores differ by only a rounding.
    """
    left = [name for name, tensor in [*loaded.named_parameters(), *loaded.named_buffers()] if tensor.is_meta]
    assert not left, f"{what}: on the meta device: {left}"
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # the grouped product does not support fp64
    errors = []
    wide = copy.deepcopy(exact).double()
    for seed in (1, 2):
        given = inputs(exact)
        if "input_ids" in given:
            numbers = torch.Generator().manual_seed(seed)
            given["input_ids"] = torch.randint(5, 60, given["input_ids"].shape, generator=numbers)
        found, expected, float32 = (runs(one, given)[0].double() for one in (loaded, wide, exact))
        scale = expected.norm()
        own = float((float32 - expected).norm() / scale)
        errors.append((float((found - expected).norm() / scale), own))
        if errors[-1][0] <= 8 * own + 1e-5:
            return
    raise AssertionError(f"{what}: relative errors (loaded, decoded in fp32): {errors}")
