"""Random models for other entry points: GGUF files, diffusers and sentence-transformers."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import diffusers
import torch
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules.pooling import Pooling
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModel, PreTrainedTokenizerFast

import torch_marlin_metal.integrations.diffusers
import torch_marlin_metal.integrations.sentence_transformers  # noqa: F401
from tests.journeys.architectures import class_of, run, shrunken
from tests.support import gguf_models, random_models
from tests.support.random_models import FAMILIES, FORMATS, compare, pack_some, write
from torch_marlin_metal import MarlinLinear, convert, load_quantized
from torch_marlin_metal.models.linear_layers import ModelMismatchError

QUANTIZED = ("Q4_0", "Q4_0", "Q4_1", "Q5_0", "Q8_0")
FLOATS = ("F16", "BF16", "F32")
PROMPT = {"encoder_hidden_states": (1, 4, 32)}
TEXTS = tuple(
    name for name in FAMILIES if name not in ("t5", "bart", "gemma3")
)  # GGUF's models with one stack of layers and only text as input


def flux(rng: random.Random) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=rng.choice((1, 2)), num_single_layers=rng.choice((0, 1)),
        attention_head_dim=16, num_attention_heads=rng.choice((2, 4)), joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    sizes = {"hidden_states": (1, 4, 16), "pooled_projections": (1, 32), "img_ids": (4, 3), "txt_ids": (4, 3)}
    return model, sizes | PROMPT


def unet(rng: random.Random) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=8, cross_attention_dim=32,
        attention_head_dim=8, use_linear_projection=rng.random() < 0.5,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return model, {"sample": (1, 4, 8, 8)} | PROMPT


def pixart(rng: random.Random) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=rng.choice((1, 2)), patch_size=2, attention_head_dim=16, num_attention_heads=2,
        in_channels=4, out_channels=8, cross_attention_dim=32, caption_channels=32, use_additional_conditions=False,
    )  # fmt: skip
    return model, {"hidden_states": (1, 4, 8, 8)} | PROMPT


def of_diffusers(rng: random.Random, work: Path) -> str:
    """Packs some layers of a model of diffusers, and loads it with `from_pretrained` or `load_quantized`."""
    make, entry_point = rng.choice((flux, unet, pixart)), rng.choice(("diffusers", "load_quantized"))
    exact, sizes = make(rng)
    layers = pack_some(rng, exact.eval(), "native")
    names = tuple(f"{layer.name}." for layer in layers)
    others = [(name, value) for name, value in exact.state_dict().items() if not name.startswith(names)]
    config = json.loads(exact.to_json_string())
    write(work / "saved", "native", layers, others, config, "diffusion_pytorch_model.safetensors")
    if entry_point == "diffusers":
        loaded = type(exact).from_pretrained(work / "saved")
    else:
        (work / "saved" / "diffusion_pytorch_model.safetensors").rename(work / "saved" / "model.safetensors")
        device = rng.choice(("cpu", "meta"))
        with torch.device(device):
            loaded = type(exact).from_config(exact.config)
        try:
            load_quantized(loaded, work / "saved", progress=False)
        except ModelMismatchError as error:
            # The table of positions is in no file, and diffusers computes it only when it creates the model.
            if (make, device) != (pixart, "meta") or "pos_embed.pos_embed" not in str(error):
                raise
            return "refused: a table that diffusers computes only with values"

    def inputs(model: Any) -> dict[str, torch.Tensor]:
        return {name: torch.randn(size) for name, size in sizes.items()} | {"timestep": torch.tensor([3.0])}

    def runs(model: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        dtype = next(model.parameters()).dtype
        return run(model, {name: value.to(dtype) for name, value in given.items()})

    count = sum(isinstance(module, MarlinLinear) for module in loaded.modules())
    assert count == len(layers), f"{count} of {len(layers)} layers are packed"
    compare(exact, loaded.eval(), f"{make.__name__}, {entry_point}", inputs, runs)
    return f"right, {make.__name__}, {entry_point}"


def of_gguf(rng: random.Random, work: Path) -> str:
    """Writes a model of any architecture of GGUF files, with random types for its matrices."""
    architecture, family = rng.choice(gguf_models.FAMILIES)
    exact = gguf_models.model_of(family)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    kinds: dict[str, str] = {}

    def kind_of(name: str) -> str:
        return kinds.setdefault(name, rng.choice(QUANTIZED + FLOATS))

    path = gguf_models.write(work / "model.gguf", architecture, exact, kind_of)
    # transformers computes Falcon-H1's vector of multipliers only when it creates the model.
    device = "cpu" if family == "falcon-h1" else rng.choice(("cpu", "meta"))
    with torch.device(device):
        loaded = type(exact)(exact.config, **gguf_models.ARGUMENTS.get(family, {})).float()
    load_quantized(loaded, path, progress=False)
    compare(exact, loaded.eval(), f"{architecture}, {family}, {device}, {kinds}")
    return f"right, GGUF, {architecture}"


def of_sentence_transformers(rng: random.Random, work: Path) -> str:
    """Loads the body of a model of transformers through sentence-transformers, and pools its last states."""
    family, target = rng.choice(TEXTS), rng.choice(sorted(FORMATS))
    model = class_of(family)(shrunken(family)).eval()
    body = AutoModel.from_config(model.config).eval()
    layers = pack_some(rng, body, target)
    state = random_models.others(body, layers)
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, "[UNK]"))
    # If the config has no dtype, transformers uses the dtype of the scales.
    config = json.loads(body.config.to_json_string()) | {"dtype": "float32"}
    try:
        write(work / "saved", target, layers, state, config)
    except convert.UnsupportedFormat:
        return "refused by the format"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        work / "saved"
    )
    try:
        loaded = Transformer(str(work / "saved"))
    except ModelMismatchError as error:
        if "has a forward of its own" not in str(error):
            raise
        return "refused: a table with a forward of its own"
    compare(
        body,
        nn.Sequential(loaded, Pooling(loaded.get_embedding_dimension(), "mean")).eval(),
        f"{family}, {target}, sentence-transformers",
        lambda _: {"input_ids": torch.arange(5, 13)[None], "attention_mask": torch.ones(1, 8)},
        pooled,
    )
    return "right, sentence-transformers"


def pooled(model: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the mean of the last states, computed by sentence-transformers' module or directly from the model."""
    with torch.no_grad():
        if isinstance(model, nn.Sequential):
            return [model(dict(given))["sentence_embedding"]]
        return [model(**given).last_hidden_state.mean(1)]


CASES = (of_diffusers, of_gguf, of_sentence_transformers)
# half of the cases load directories through this package's own entry points
ENTRY_POINTS = (*CASES, *[random_models.case] * len(CASES))


def case(rng: random.Random, work: Path) -> str:
    torch.manual_seed(rng.randrange(1 << 30))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rng.choice(ENTRY_POINTS)(rng, work)
