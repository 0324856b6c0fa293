"""The ten most common kinds of files, from file to generated tokens, with the lines that a user types.

`python -m tests.journeys.test_ranks --write` writes the table of docs/use/what-loads.md.
"""

import functools
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import torch_marlin_metal.integrations.transformers  # noqa: F401
from scripts import page_section
from tests.integrations.test_beside_transformers import blocks, fp8, gptq, scaled, scheme, write
from tests.load.test_models_of_widths import GPTQ, four
from tests.support import gguf_models, k_quants
from tests.support.decoded_layers import decoded
from torch_marlin_metal import load_quantized, quantize_weight
from torch_marlin_metal.layers.packed_layer import PackedLayer

ROOT = Path(__file__).parents[2]
PAGE, MODELS = ROOT / "docs/use/what-loads.md", ROOT / "tests/data/models"
SECTION = "tests.journeys.test_ranks"
IDS = torch.tensor([[3, 9, 27, 5]])
NEW = 4
# K-quants have blocks of 256 weights.
LARGE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 8}
# relative to the norm of the logits: twice the error of fp16; wrong words in one kind of layer cause 0.008 or more
FAR = 0.003


def blocks_of(values: np.ndarray, kind: Any) -> np.ndarray:
    """Quantizes with the package gguf, or with our own encoders for the types that gguf can only decode."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return k_quants.encode(values, kind.name)


def q4_k_m(name: str) -> str:
    """Returns the type of a tensor by llama.cpp's recipe, as far as it applies to two layers."""
    return "Q6_K" if "attn_v" in name or "ffn_down" in name or name.startswith("output") else "Q4_K"


def ud_q4_k_xl(name: str) -> str:
    """Returns the type of a tensor in unsloth's files: gate and up Q4_K, down Q5_K, everything else Q8_0."""
    return "Q5_K" if "down_exps" in name else "Q4_K" if "_exps" in name else "Q8_0"


def ud_q2_k_xl(name: str) -> str:
    return "Q3_K" if "down_exps" in name else "Q2_K" if "_exps" in name else "Q8_0"


Made = tuple[Path, torch.Tensor]  # a file, and the logits of the weights that its producer decodes


def of_gguf(architecture: str, family: str, kinds: Callable[[str], str]) -> Callable[[Path], Made]:
    def made(path: Path) -> Made:
        model = gguf_models.model_of(family, **LARGE)
        model.config.save_pretrained(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf_models, "quantize", blocks_of)
            file = gguf_models.write(path / "model.gguf", architecture, model, kinds)
        return file, gguf_models.outputs(model, IDS)  # gguf decodes the weights of the model

    return made


def of_layers(path: Path) -> Made:
    """Returns the logits of a directory's weights, decoded in NumPy by the formats' definitions."""
    state = load_file(path / "model.safetensors")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    for name, tensor in model.state_dict().items():
        base = name.removesuffix(".weight")
        own = {key.removeprefix(f"{base}."): value for key, value in state.items() if key.startswith(f"{base}.")}
        tensor.copy_(torch.from_numpy(decoded(own)) if "_proj" in name else own["weight"])
    return path, gguf_models.outputs(model.float().eval(), IDS)


def nvfp4_and_fp8(path: Path) -> Made:
    """Writes the MLP in NVFP4 and the attention in FP8, as compressed-tensors does."""

    def part(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if weight.shape[0] == weight.shape[1]:
            return fp8(weight)
        packed = quantize_weight(weight, "nvfp4", 16)
        return {
            "weight_packed": packed.b_packed.T.contiguous().view(torch.uint8),
            "weight_scale": packed.scales.T.contiguous().view(torch.float8_e4m3fn),
            "weight_global_scale": 1 / packed.global_scale,
        }

    write(path, part, scheme("mixed-precision", 4, "float"))
    return of_layers(path)


def four_and_eight(path: Path) -> Made:
    """Writes AutoRound's layers, most in 4 bit and some in 8 bit."""
    names = [f"model.layers.{index}.mlp.down_proj" for index in range(2)]
    settings = GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:gptq"}
    settings["extra_config"] = {name: {"bits": 8} for name in names}
    write(path, lambda weight: (gptq if weight.shape[0] < weight.shape[1] else four)(weight), settings)
    return of_layers(path)


def in_halves(path: Path, dtype: torch.dtype, scales: torch.dtype | None = None) -> Path:
    """Stores unquantized tensors in 16 bits, and scales in `scales` if it is given."""
    file = path / "model.safetensors"
    state = load_file(file)
    for name, value in state.items():
        if value.dtype == torch.float32 and (scales or "scale" not in name):
            state[name] = value.to(scales if "scale" in name else dtype)
    save_file(state, file, {"format": "pt"})
    return path


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def block_fp8(path: Path) -> Made:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    write(path, lambda weight: blocks(weight, 128), BLOCKS, **sizes)
    return of_layers(in_halves(path, torch.float16, torch.bfloat16))


def of_mlx(folder: str) -> Callable[[Path], Made]:
    """Returns a function that returns a directory of mlx-lm, and the logits of mlx-lm's own model."""
    file = MODELS / "mlx" / folder
    return lambda path: (file, torch.from_numpy(np.load(file / "logits.npy"))[None, : IDS.shape[1]])


def bitsandbytes(path: Path) -> Made:
    """Returns a directory of bitsandbytes, and the logits of the weights that bitsandbytes decodes."""
    file = MODELS / "bitsandbytes-nf4-doublequant"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file))
    state = load_file(file / "model.safetensors") | load_file(file / "reference.safetensors")
    model.load_state_dict({name: state[name] for name in model.state_dict() if name in state}, strict=False)
    return file, gguf_models.outputs(model.float().eval(), IDS)


@dataclass(frozen=True)
class Journey:
    """A kind of file: its rank, its name, a function that writes a small one, and its packed parts."""

    rank: int
    what: str
    make: Callable[[Path], Made]
    packed: str


JOURNEYS = (
    Journey(1, "GGUF Q4_K_M, dense", of_gguf("qwen3", "qwen3", q4_k_m), "all"),
    Journey(1, "GGUF UD-Q4_K_XL, mixture", of_gguf("qwen35moe", "qwen35moe", ud_q4_k_xl), "all"),
    Journey(2, "MLX 4 bit, mixture", of_mlx("qwen3_5_moe-affine4"), "all but routers"),
    Journey(3, "gpt-oss, MLX MXFP4-Q8", of_mlx("gpt_oss-mxfp4-q8"), "all"),
    Journey(4, "NVFP4 and FP8", nvfp4_and_fp8, "all"),
    Journey(5, "GGUF Q8_0", of_gguf("llama", "llama", lambda name: "Q8_0"), "all"),
    Journey(5, "MLX mxfp8, mixture", of_mlx("glm4_moe-mxfp8"), "all"),
    Journey(6, "GGUF Q6_K", of_gguf("llama", "llama", lambda name: "Q6_K"), "all"),
    Journey(6, "MLX mixed_4_6, mixture", of_mlx("qwen3_moe-mixed_4_6"), "all"),
    Journey(7, "FP8 in blocks", block_fp8, "all"),
    Journey(8, "GGUF UD-Q2_K_XL, mixture", of_gguf("qwen3moe", "qwen3moe", ud_q2_k_xl), "all, Q2_K and Q3_K as 4 bit"),
    Journey(9, "AutoRound int4 and int8", four_and_eight, "all"),
    Journey(10, "bitsandbytes nf4", bitsandbytes, "all"),
)


def load(path: Path, device: str) -> Any:
    """Loads a file with the lines that a user types."""
    if path.suffix == ".gguf":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent)).half()
        load_quantized(model, path, device=device, progress=False)
        return model.to(device).eval()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16, device_map={"": device})


def bytes_of(model: nn.Module) -> tuple[int, int]:
    """Returns the bytes of a model's tensors, and of its packed layers."""
    held = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    layers = [layer for layer in model.modules() if isinstance(layer, PackedLayer)]
    inside = {id(t): t.nbytes for layer in layers for t in layer.buffers()}
    return sum(held.values()), sum(inside.values())


def bytes_in(path: Path) -> int:
    if path.suffix == ".gguf":
        return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    total = 0
    with safe_open(path / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no dictionary
            total += file.get_tensor(name).nbytes
    return total


def run(made: Made, device: str = "cpu") -> tuple[float, float]:
    """Loads, compares and generates. Returns the bytes in memory over those in the file, and the packed share."""
    path, expected = made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(path, device)
    with torch.no_grad():
        found = model(IDS.to(device)).logits.float().cpu()
        tokens = model.generate(IDS.to(device), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert torch.linalg.norm(found - expected) < FAR * torch.linalg.norm(expected)
    assert tokens.shape == (1, IDS.shape[1] + NEW)
    held, packed = bytes_of(model)
    return held / bytes_in(path), packed / held


def row(journey: Journey, result: tuple[float, float]) -> str:
    return f"| {journey.rank} | {journey.what} | {journey.packed} | {result[1]:.0%} | {result[0]:.2f} |"


def rows_of_page() -> list[str]:
    return page_section.section(PAGE, SECTION).splitlines()[2:]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Callable[[Journey], Made]:
    """Returns a function that writes the file of a kind when a test first needs it."""
    return functools.cache(lambda journey: journey.make(tmp_path_factory.mktemp("file")))


@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: journey.what)
def test_a_file_of_each_rank_loads_and_generates_as_the_page_says(journey, files) -> None:
    assert row(journey, run(files(journey))) in rows_of_page()


def is_sampled(journey: Journey) -> bool:
    """Returns whether the sample includes this kind on mps. The other kinds have similar layouts and kernels."""
    return journey.what not in ("MLX mxfp8, mixture", "MLX mixed_4_6, mixture", "FP8 in blocks")


ON_MPS = [pytest.param(one, id=one.what, marks=[] if is_sampled(one) else pytest.mark.whole) for one in JOURNEYS]


@pytest.mark.parametrize("journey", ON_MPS)
def test_the_same_on_mps(journey, files, mps) -> None:
    assert row(journey, run(files(journey), mps)) in rows_of_page()


def test_the_page_has_all_ranks() -> None:
    assert {journey.rank for journey in JOURNEYS} == set(range(1, 11))
    assert len(rows_of_page()) == len(JOURNEYS)


# All sizes are reduced, but the vocabulary and the heads have the same shares as in the real models.
LLAMA_8B = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 3}
LLAMA_8B |= {"num_attention_heads": 8, "num_key_value_heads": 2}
GPT_OSS = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 256, "num_local_experts": 16}
GPT_OSS |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


def int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scale = scaled(weight, 127)
    return {"weight": codes.round().to(torch.int8), "weight_scale": scale}


def of_safetensors(part: Callable[..., Any], settings: dict[str, Any], scales: torch.dtype) -> Callable[[Path], Path]:
    def made(path: Path) -> Path:
        write(path, part, settings, **LLAMA_8B)
        return in_halves(path, torch.bfloat16, scales)

    return made


def shrunken(architecture: str, family: str, sizes: dict[str, int], kinds: Callable[[str], str]) -> Any:
    def made(path: Path) -> Path:
        model = gguf_models.model_of(family, **sizes)
        model.config.save_pretrained(path)
        return gguf_models.write(path / "model.gguf", architecture, model, kinds)

    return made


# A function that writes a file, and the largest allowed ratio of bytes in memory to bytes in the file.
EIGHT_BITS = {
    "Llama FP8, a scale for each row": (of_safetensors(fp8, scheme("float-quantized"), torch.bfloat16), 1.01),
    "Llama int8": (of_safetensors(int8, scheme("int-quantized"), torch.bfloat16), 1.01),
    "Llama FP8 in blocks": (of_safetensors(lambda w: blocks(w, 128), BLOCKS, torch.bfloat16), 1.001),
    "Llama FP8 in blocks, fp32": (of_safetensors(lambda w: blocks(w, 128), BLOCKS, torch.float32), 1.001),
    "Llama Q8_0": (shrunken("llama", "llama", LLAMA_8B, lambda name: "Q8_0"), 1.01),
    "gpt-oss MXFP4 and Q8_0": (
        shrunken("gpt-oss", "gpt_oss", GPT_OSS, lambda name: "MXFP4" if "_exps" in name else "Q8_0"),
        1.02,
    ),
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_a_shrunken_model_of_8_bit_takes_the_memory_of_its_file(name, tmp_path) -> None:
    make, largest = EIGHT_BITS[name]
    path = make(tmp_path)
    assert bytes_of(load(path, "cpu"))[0] / bytes_in(path) <= largest


def table() -> str:
    lines = ["| rank | file | what stays packed | share of memory | memory / file |", "|---|---|---|---|---|"]
    for journey in JOURNEYS:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(row(journey, run(journey.make(Path(folder)))))
    return "\n".join(lines)


if __name__ == "__main__":
    logging.set_verbosity_error()
    page_section.main(PAGE, SECTION, table)
