"""Complete pipelines of diffusers with packed models: offloading to the CPU, and a text encoder from a GGUF file."""

import inspect
import warnings
from types import SimpleNamespace

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5EncoderModel

import torch_marlin_metal as tmm
from examples import diffusion
from tests.support import gguf_models
from tests.support.diffusion_files import FAMILIES, PREFIX, flux_of_any_width, psnr, write_gguf, write_safetensors
from tests.support.models import packed_layers
from torch_marlin_metal import load_quantized
from torch_marlin_metal.checkpoints.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = diffusion.SIZES["joint_attention_dim"]


@pytest.fixture
def transformer(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    file = diffusion.write_fp8(tmp_path)
    return diffusion.FluxTransformer2DModel.from_single_file(
        str(file), config=str(tmp_path), quantization_config=diffusion.MarlinConfig(), torch_dtype=torch.float32
    )


def image(pipe, device: str = "cpu", **prompt) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    given = {"prompt_embeds": torch.randn(1, 8, WIDTH, generator=generator)} | prompt
    given["pooled_prompt_embeds"] = torch.randn(1, WIDTH, generator=generator)
    given = {name: held.to(device) for name, held in given.items()}
    settings = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt", "generator": generator}
    pipe.set_progress_bar_config(disable=True)
    return pipe(**given, **settings).images.cpu()


@pytest.mark.parametrize("sequential", [False, True])
def test_an_offloaded_pipeline_makes_the_image_of_the_cpu(sequential, transformer, mps) -> None:
    pipe = diffusion.pipeline(transformer)
    want, layers, devices = image(pipe), packed_layers(transformer).values(), set()
    assert len(layers) == 28
    for layer in layers:
        layer.register_forward_hook(lambda layer, given, result: devices.add((layer.b_packed.device, result.device)))
    (pipe.enable_sequential_cpu_offload if sequential else pipe.enable_model_cpu_offload)(device=mps)
    got = image(pipe, mps)
    assert {each.type for pair in devices for each in pair} == {"mps"}
    assert psnr(got, want) > 80
    if not sequential:
        pipe.maybe_free_model_hooks()
        assert {held.device.type for layer in layers for held in layer.buffers()} == {"cpu"}


class Letters:
    """Replaces T5's tokenizer: each letter is a token."""

    model_max_length = 512
    tokenize, added_tokens_encoder = list, {}

    def __call__(self, texts, max_length=0, **more):
        ids = torch.zeros(len(texts), max(max_length, *map(len, texts)), dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor([ord(letter) % 64 for letter in text])
        return SimpleNamespace(input_ids=ids)

    def batch_decode(self, ids):
        return [""] * len(ids)


def test_a_text_encoder_of_a_gguf_file_encodes_the_prompt(transformer, tmp_path) -> None:
    exact = gguf_models.model_of("t5encoder")
    path = gguf_models.write(tmp_path / "t5-Q8_0.gguf", "t5encoder", exact, lambda name: "Q8_0")
    encoder = T5EncoderModel(exact.config).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_quantized(encoder, path, progress=False)
    assert len(packed_layers(encoder)) == 16  # the table has two names
    pipe, images = diffusion.pipeline(transformer), []
    for model in (encoder, exact):
        pipe.register_modules(text_encoder_2=model, tokenizer_2=Letters())
        embeds = pipe._get_t5_prompt_embeds("a cat", max_sequence_length=8, device="cpu", dtype=torch.float32)
        images.append(image(pipe, prompt_embeds=embeds))
    other = image(pipe, prompt_embeds=torch.zeros(1, 8, WIDTH))
    assert psnr(*images) > 80 > psnr(other, images[1])


@pytest.mark.parametrize(("kind", "count"), [(("Q4_K", "Q8_0"), 27), ("comfy", 28), (None, 0)])
def test_a_pipeline_of_a_single_file_has_a_packed_transformer(kind, count, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    family, pipes = FAMILIES["flux"], tmp_path / "pipeline"
    with flux_of_any_width():
        whole = diffusion.pipeline(family.model())
        whole.save_pretrained(pipes)
        if isinstance(kind, tuple):
            file = write_gguf(tmp_path / "file", family, kind)
        else:
            file = write_safetensors(tmp_path / "file", family, "comfy", PREFIX)
        if kind == "comfy":  # ComfyUI's file also contains another model
            tensors = load_file(file.path) | {"vae.decoder.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}
            save_file(tensors, file.path)
        if kind is None:
            save_file({PREFIX + name: tensor.contiguous() for name, tensor in file.decoded.items()}, file.path)
        parts = diffusion.WITHOUT | {"vae": whole.vae}
        pipe = diffusers.FluxPipeline.from_single_file(str(file.path), config=str(pipes), **parts)
        alone = family.cls.from_single_file(str(file.path), config=str(file.config))
    assert len(packed_layers(pipe.transformer)) == len(packed_layers(alone)) == count
    held = alone.state_dict()
    assert pipe.transformer.state_dict().keys() == held.keys()
    assert all(torch.equal(tensor, held[name]) for name, tensor in pipe.transformer.state_dict().items())


def test_scales_of_text_encoders_that_diffusers_would_ignore_are_refused(tmp_path) -> None:
    file = write_safetensors(tmp_path, FAMILIES["flux"], "comfy", PREFIX)
    name = "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.k"
    lost = {f"{name}.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), f"{name}.scale_weight": torch.ones(1)}
    save_file(load_file(file.path) | lost, file.path)
    with pytest.raises(CheckpointError, match=rf"without scales, got '{name}.scale_weight'.*pass the text encoders"):
        diffusers.FluxPipeline.from_single_file(str(file.path), config=str(tmp_path), vae=None)


def takes_a_model(function: object) -> bool:
    return inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "model"


PUBLIC = [getattr(tmm, name) for name in tmm.__all__] + [getattr(tmm.convert, name) for name in tmm.convert.__all__]
TAKE_A_MODEL = [function for function in PUBLIC if takes_a_model(function)]


def test_the_public_functions_of_a_model_are_found() -> None:
    assert {tmm.fuse_projections, tmm.convert.replace_linear_layers, load_quantized} < set(TAKE_A_MODEL)


@pytest.mark.parametrize("op", TAKE_A_MODEL, ids=lambda op: op.__name__)
def test_a_pipeline_in_place_of_a_model_is_an_error_that_names_its_models(op, tmp_path) -> None:
    pipe = diffusion.pipeline(diffusion.FluxTransformer2DModel(**diffusion.SIZES))
    with pytest.raises(TypeError, match=rf"{op.__name__}: model: expected .*, got FluxPipeline: .* vae, transformer"):
        op(pipe, *{load_quantized: [tmp_path], tmm.set_activations: [None]}.get(op, []))
