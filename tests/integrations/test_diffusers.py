"""Models of diffusers: quantized during a load or in memory, saved, and loaded with and without this package."""

import os

import pytest
import torch

from tests.support.models import packed_layers, same
from tests.support.programs import run_python
from torch_marlin_metal import MarlinLinear, gemm, quantize_model
from torch_marlin_metal.checkpoints.card import CARD
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.formats.native import ADVICE

diffusers = pytest.importorskip("diffusers")

from safetensors.torch import load_file, save_file  # noqa: E402

from torch_marlin_metal.integrations.diffusers import MarlinConfig  # noqa: E402

os.environ["HF_HUB_OFFLINE"] = "1"
Flux = diffusers.FluxTransformer2DModel
# Parts of a pipeline that are not needed if the call passes the embeddings of a prompt.
FLUX_WITHOUT = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
SD_WITHOUT = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
WEIGHTS = "diffusion_pytorch_model.safetensors"


def transformer(seed: int = 0):
    torch.manual_seed(seed)
    return Flux(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip


def vae():
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def flux_like(model):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(scheduler=scheduler, vae=vae(), transformer=model, **FLUX_WITHOUT)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def unet():
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=8, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip


def stable_diffusion_like(model):
    pipe = diffusers.StableDiffusionPipeline(
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        vae=vae(),
        unet=model,
        requires_safety_checker=False,
        **SD_WITHOUT,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe, size: int) -> torch.Tensor:
    """Runs two steps on random embeddings of a prompt, and returns the latents."""
    generator = torch.Generator().manual_seed(1)
    given = {"prompt_embeds": torch.randn(1, 16, 32, generator=generator)}
    if isinstance(pipe, diffusers.FluxPipeline):
        given["pooled_prompt_embeds"] = torch.randn(1, 32, generator=generator)
    else:
        given["guidance_scale"] = 1.0
    with torch.no_grad():
        return pipe(**given, height=size, width=size, num_inference_steps=2, output_type="latent",
                    generator=generator).images  # fmt: skip


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    path = tmp_path_factory.mktemp("flux") / "floats"
    transformer().save_pretrained(path)
    return path


def test_a_model_is_quantized_while_it_loads(floats) -> None:
    model = Flux.from_pretrained(floats, quantization_config=MarlinConfig("uint4", 32))
    expected = transformer()
    quantize_model(expected, "uint4", 32, progress=False)
    assert packed_layers(model).keys() == packed_layers(expected).keys()
    assert len(packed_layers(model)) > 20
    assert same(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_is_saved_and_loads_the_same_bits(floats, dtype, tmp_path) -> None:
    config = MarlinConfig("nvfp4", modules_to_not_convert=["norm_out.*", "proj_out"])
    model = Flux.from_pretrained(floats, quantization_config=config, torch_dtype=dtype)
    assert not any(name.startswith(("norm_out", "proj_out")) for name in packed_layers(model))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == CARD
    again = Flux.from_pretrained(tmp_path, torch_dtype=dtype)
    assert packed_layers(again).keys() == packed_layers(model).keys()
    assert same(again.state_dict(), model.state_dict())
    assert again.half().transformer_blocks[0].attn.to_q.bias.dtype == torch.float16


def test_a_model_quantized_in_memory_is_saved_in_shards_and_loads_the_same_bits(tmp_path) -> None:
    model = transformer()
    quantize_model(model, "uint4", 32, progress=False)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = Flux.from_pretrained(tmp_path)
    assert same(again.state_dict(), model.state_dict())
    floats = again.dequantize()
    assert not packed_layers(floats)
    floats.save_pretrained(tmp_path / "dense")
    dense = Flux.from_pretrained(tmp_path / "dense")
    assert torch.equal(dense.proj_out.weight, model.proj_out.dequantize())


@pytest.mark.parametrize(
    ("make", "pipeline", "part", "size"),
    [(transformer, flux_like, "transformer", 256), (unet, stable_diffusion_like, "unet", 64)],
)
def test_a_pipeline_quantizes_saves_and_loads_one_part(make, pipeline, part, size, tmp_path) -> None:
    """Products have many rows: 4096 + 16 tokens in the pipeline like Flux, 1024 in the other pipeline."""
    dense = pipeline(make())
    without = FLUX_WITHOUT if part == "transformer" else SD_WITHOUT
    dense.save_pretrained(tmp_path / "floats")
    chosen = diffusers.PipelineQuantizationConfig(quant_mapping={part: MarlinConfig("uint4", 32, "mse")})
    pipe = type(dense).from_pretrained(tmp_path / "floats", quantization_config=chosen, **without)
    pipe.set_progress_bar_config(disable=True)
    rows = []
    modules = getattr(pipe, part).named_modules()
    query = next(module for name, module in modules if name.endswith(("attn.to_q", "attn1.to_q")))
    assert isinstance(query, MarlinLinear)
    handle = query.register_forward_hook(lambda _, given, out: rows.append(out.shape[-2]))
    result = image(pipe, size)
    handle.remove()
    assert max(rows) == {"transformer": 4096, "unet": 1024}[part]
    exact = image(dense, size)
    assert float((result - exact).norm() / exact.norm()) < 0.2
    pipe.save_pretrained(tmp_path / "saved")
    again = type(dense).from_pretrained(tmp_path / "saved", **without)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(image(again, size), result)


def test_a_pipeline_takes_the_name_of_the_method(floats, tmp_path) -> None:
    flux_like(transformer()).save_pretrained(tmp_path)
    settings = {"weight_format": "uint4", "group_size": 32}
    config = diffusers.PipelineQuantizationConfig("torch_marlin_metal", settings, ["transformer"])
    pipe = diffusers.FluxPipeline.from_pretrained(tmp_path, quantization_config=config, **FLUX_WITHOUT)
    assert same(pipe.transformer.state_dict(),
                Flux.from_pretrained(floats, quantization_config=MarlinConfig("uint4", 32)).state_dict())  # fmt: skip


@pytest.fixture
def saved(floats, tmp_path):
    Flux.from_pretrained(floats, quantization_config=MarlinConfig("uint4", 32)).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_without_this_package_diffusers_says_what_to_import(saved) -> None:
    code = f"from diffusers import FluxTransformer2DModel as Flux\nFlux.from_pretrained({str(saved)!r})"
    done = run_python("-c", code)
    assert done.returncode == 1
    assert ADVICE in done.stderr


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("proj_out.scales"), "proj_out.b_packed': scales are missing"),
        (lambda state: state.update({"proj_out.scales": torch.ones(1, 16)}), r"'proj_out.scales'.*got"),
        (lambda state: state["proj_out.scales"].fill_(torch.nan), "proj_out.scales': scales: expected finite values"),
        (lambda state: state["proj_out.packed_format"].fill_(0), "proj_out.packed_format': expected version 1"),
    ],
)
def test_a_damaged_directory_is_refused(saved, damage, message) -> None:
    state = load_file(saved / WEIGHTS)
    damage(state)
    save_file(state, saved / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        Flux.from_pretrained(saved)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MarlinConfig("uint4", 32, modules_to_not_convert=["nothing"]), "nothing"),
        (MarlinConfig("uint4", 32, modules_to_not_convert=["*"]), "no layer was quantized"),
        (MarlinConfig("uint4", 48), "48"),
        (MarlinConfig("uint4", 32, fuse="layers"), "fuse: expected True or False for a model of diffusers"),
    ],
)
def test_wrong_arguments_are_refused(floats, config, message) -> None:
    with pytest.raises(ValueError, match=message):
        Flux.from_pretrained(floats, quantization_config=config)
    with pytest.raises(ValueError, match=r"expected cpu or mps, got .*meta"):
        Flux.from_pretrained(floats, quantization_config=MarlinConfig("uint4", 32), device_map={"": "meta"})


def test_layers_round_weights_as_those_of_diffusers_do(tmp_path) -> None:
    model = transformer()
    exact = torch.nn.Sequential(transformer().proj_out)
    quantize_model(exact, "uint4b8", 16, progress=False)
    quantize_model(model, "uint4b8", 16, progress=False)
    model.save_pretrained(tmp_path)
    for one in (model, Flux.from_pretrained(tmp_path, quantization_config=MarlinConfig(fuse=True))):
        layers = [module for module in one.modules() if isinstance(module, MarlinLinear)]
        assert layers
        assert all(layer.rounds_weights for layer in layers)
    rows = torch.randn(128, exact[0].in_features).bfloat16()
    given = exact[0].to_packed()
    assert torch.equal(model.proj_out(rows), gemm(rows, given, variant="rounded"))
    assert torch.equal(exact(rows), gemm(rows, given))
    assert not exact[0].rounds_weights
