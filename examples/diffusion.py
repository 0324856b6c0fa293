"""Generates an image with a tiny FLUX whose weights stay packed, from a file in the layout of FLUX's authors.

    python examples/diffusion.py [--device mps] [--picture FILE.png]

The transformer and the VAE have random weights, so the image is noise. The steps for real files are the same:
`from_single_file` keeps the weights of a GGUF file or of an FP8 file packed, and the pipeline runs as usual.
"""

import argparse
import tempfile
from pathlib import Path

import diffusers
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from safetensors.torch import save_file

from torch_marlin_metal import MarlinLinear
from torch_marlin_metal.integrations.diffusers import MarlinConfig

SIZES = {"in_channels": 64, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128}
SIZES |= {"num_attention_heads": 1, "joint_attention_dim": 64, "pooled_projection_dim": 64}
WITHOUT = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))


def write_fp8(folder: Path) -> Path:
    """Writes a transformer in ComfyUI's scaled FP8 format: E4M3 weights, with one scale for each matrix."""
    model, state = FluxTransformer2DModel(**SIZES), {}
    model.save_config(folder)
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 2:
            scale = tensor.abs().max() / 448
            state[name] = (tensor / scale).to(torch.float8_e4m3fn)
            state[f"{name.removesuffix('.weight')}.scale_weight"] = scale
        else:
            state[name] = tensor.bfloat16()
    save_file(state | {"scaled_fp8": torch.zeros(0).to(torch.float8_e4m3fn)}, folder / "flux-fp8.safetensors")
    return folder / "flux-fp8.safetensors"


def pipeline(transformer: FluxTransformer2DModel) -> FluxPipeline:
    """Puts a transformer into a pipeline, with a tiny VAE and without text encoders."""
    vae = AutoencoderKL(
        shift_factor=0.1,
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=2, latent_channels=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, transformer=transformer, **WITHOUT)


def main(arguments: list[str] | None = None) -> torch.Tensor:
    """Runs the example. Returns the image `[H, W, 3]` with values of 0 to 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        file = write_fp8(Path(place))
        transformer = FluxTransformer2DModel.from_single_file(
            str(file), config=place, quantization_config=MarlinConfig(), torch_dtype=torch.float32
        )
        stored = file.stat().st_size
    packed = sum(isinstance(module, MarlinLinear) for module in transformer.modules())
    tensors = (*transformer.parameters(), *transformer.buffers())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    print(f"{packed} packed layers, {size / 1e6:.2f} MB in memory, {stored / 1e6:.2f} MB in the file")
    pipe = pipeline(transformer).to(given.device)
    images = pipe(
        prompt_embeds=torch.randn(1, 8, 64, device=given.device),
        pooled_prompt_embeds=torch.randn(1, 64, device=given.device),
        height=32, width=32, num_inference_steps=2, output_type="pt",
    ).images  # fmt: skip
    if given.picture is not None:
        diffusers.utils.pt_to_pil(images * 2 - 1)[0].save(given.picture)
    return images[0].permute(1, 2, 0).cpu()


if __name__ == "__main__":
    main()
