"""Whole pipelines of diffusers with packed models: offloading to the CPU, and the text encoder of a GGUF file."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import T5EncoderModel

from examples import diffusion
from tests.support import gguf_models
from tests.support.diffusion_files import psnr
from torch_marlin_metal import MarlinLinear, load_quantized

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


def packed(model) -> list[MarlinLinear]:
    return [module for module in model.modules() if isinstance(module, MarlinLinear)]


@pytest.mark.parametrize("sequential", [False, True])
def test_an_offloaded_pipeline_makes_the_image_of_the_cpu(sequential, transformer, mps) -> None:
    pipe = diffusion.pipeline(transformer)
    want, layers, devices = image(pipe), packed(transformer), set()
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
    """Stands for T5's tokenizer: a letter is a token."""

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
    assert len(packed(encoder)) == 16  # its table has two names
    pipe, images = diffusion.pipeline(transformer), []
    for model in (encoder, exact):
        pipe.register_modules(text_encoder_2=model, tokenizer_2=Letters())
        embeds = pipe._get_t5_prompt_embeds("a cat", max_sequence_length=8, device="cpu", dtype=torch.float32)
        images.append(image(pipe, prompt_embeds=embeds))
    other = image(pipe, prompt_embeds=torch.zeros(1, 8, WIDTH))
    assert psnr(*images) > 80 > psnr(other, images[1])
