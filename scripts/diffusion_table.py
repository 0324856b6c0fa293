"""Writes the table of sizes in docs/use/diffusion.md: FLUX's memory for each kind of file, and the smallest Mac for it.

    python -m scripts.diffusion_table --write

The sizes follow from the configuration of FLUX.1-dev, which is the default of diffusers' classes. No file is needed.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from scripts import page_section
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS
from torch_marlin_metal.cli.models.fit import gpu_memory

PAGE = Path(__file__).resolve().parents[1] / "docs/use/diffusion.md"
MACS = (8, 16, 24, 32, 48, 64, 96)  # GB
GGUF = ("Q4_K", "Q4_0", "Q5_K", "Q6_K", "Q8_0")
FLOATS, FP8, NVFP4 = "16 bit", "FP8", "NVFP4"
KINDS = (*GGUF, NVFP4, FP8, FLOATS)
BLOCKS = ("transformer_blocks.", "single_transformer_blocks.")


def bits(kind: str, K: int) -> float:
    """Returns the bits in memory per weight of a matrix, including its scales."""
    if kind == FLOATS:
        return 16
    if kind == FP8:  # one fp32 scale for each row
        return 8 + 32 / K
    size, decode = DECODERS[kind]
    weight = decode(torch.zeros(1, 1, size, dtype=torch.uint8, device="cpu"))
    return 8 * sum(held.nbytes for name, held in weight.tensors().items() if name != "lut") / weight.K


def size(model: nn.Module, kind: str, packed: tuple[str, ...] = ("",)) -> float:
    """Returns a model's GB if matrices below the names `packed` have the format `kind` and all others have 16 bits."""
    total = 0.0
    for name, tensor in model.named_parameters():
        matrix = name.startswith(packed) and tensor.dim() == 2 and "embed" not in name and "shared" not in name
        total += tensor.numel() * (bits(kind, tensor.shape[1]) if matrix else 16)
    return total / 8e9


def table() -> str:
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(guidance_embeds=True)
        t5 = T5EncoderModel(
            T5Config(d_model=4096, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
        )
        clip = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12))
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), latent_channels=16, layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        )  # fmt: skip
    encoder = size(t5, "Q8_0")
    beside = size(clip, FLOATS) + size(vae, FLOATS)
    lines = ["| weights of the blocks | transformer | without T5 | with T5 in 8 bits |", "|---|---|---|---|"]
    for kind in KINDS:
        own = size(transformer, kind, BLOCKS)
        cells = [f"{own:.1f} GB"]
        for total in (own + beside, own + beside + encoder):
            mac = next((mac for mac in MACS if gpu_memory(f"{mac}GB") / 1e9 >= total), None)
            cells.append(f"{total:.1f} GB, Mac of {mac} GB")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    page_section.main(PAGE, "scripts.diffusion_table", table)
