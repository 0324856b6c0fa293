"""A file, the library or the model's class sets every tensor of a loaded model; otherwise the load stops."""

import ast
import copy
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.journeys.architectures import SIZES as ALL_SIZES
from tests.journeys.architectures import inputs_of, shrunken
from tests.support.models import SIZES
from torch_marlin_metal import convert, load_quantized, quantize_weight
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.models.linear_layers import ModelMismatchError

MODELS = Path(transformers.__file__).parent / "models"
# The model class that has the table, and arguments of its config besides small sizes. None means the default config.
FAMILIES: dict[str, tuple[str, dict | None]] = {
    "diffusion_gemma": ("DiffusionGemmaEncoderTextModel", {"top_k_experts": 2}),
    "embedding_gemma2": ("EmbeddingGemma2TextModel", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
    "gemma3n": ("Gemma3nForCausalLM", {"num_kv_shared_layers": 0}),
    "gemma4": ("Gemma4ForCausalLM", {}),
    "gemma4_unified": ("Gemma4UnifiedForCausalLM", {}),
    "minicpm3": ("MiniCPM3ForCausalLM", {}),
    "t5gemma2": ("T5Gemma2ForConditionalGeneration", None),
    "vaultgemma": ("VaultGemmaForCausalLM", {}),
}
WITHOUT_LOOKUP = {"fsmt"}  # only the class itself creates the weight


def made(family: str) -> PreTrainedModel:
    """Returns a small model with random weights. The scales of its tables differ from 1."""
    name, more = FAMILIES[family]
    kind = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    if more is None:
        return kind(shrunken(family)).eval()
    known = kind.config_class.__dataclass_fields__
    return kind(kind.config_class(**{name: size for name, size in ALL_SIZES.items() if name in known} | more)).eval()


def table_families() -> set[str]:
    """Returns the models of transformers with a class of embeddings that has tensors besides the weight."""
    found = set()
    for file in MODELS.glob("*/modeling_*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "(nn.Embedding)" in text else ():
            if isinstance(node, ast.ClassDef) and "nn.Embedding" in map(ast.unparse, node.bases):
                made = re.findall(r"register_buffer\(|self\.\w+ = nn\.(?:Parameter|Buffer)\(", ast.unparse(node))
                found |= {file.parent.name} if made else set()
    return found


def test_the_list_of_families_is_that_of_transformers() -> None:
    assert set(FAMILIES) == table_families() - WITHOUT_LOOKUP


def checkpoint(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """Saves the vocabulary and some layers of a model in 4 bit. Returns the model with the decoded values."""
    exact = copy.deepcopy(model)
    tables = {name for name, module in model.named_modules() if module is model.get_input_embeddings()}
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and "lm_head" not in name]
    layers = []
    for name in [*tables, *(name for name in linear if name.endswith(("q_proj", "down_proj")))]:
        weight = exact.get_submodule(name).weight
        if weight.shape[1] % 32 == 0:
            layers.append(quantize_weight(weight.detach(), "uint4", 32, scale_dtype=torch.float32))
            layers[-1].name = name
            weight.data.copy_(layers[-1].dequantize().T)
    packed = {f"{layer.name}.weight" for layer in layers} | set(model.all_tied_weights_keys)
    others = [(name, value) for name, value in model.state_dict().items() if name not in packed]
    config = json.loads(model.config.to_json_string())
    convert.export_checkpoint(layers, path, "compressed-tensors", other_tensors=others, config=config)
    return exact


def run(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return model.eval()(**inputs_of(model))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_table_with_other_tensors_computes_what_the_decoded_model_computes(family, tmp_path) -> None:
    torch.manual_seed(0)
    model = made(family)
    exact = checkpoint(model, tmp_path / "saved")
    config = MarlinConfig(on_unsupported="dequantize")
    with torch.device("meta"):
        empty = made(family)
    loaded = {
        "from_pretrained": type(model).from_pretrained(
            tmp_path / "saved", quantization_config=config, dtype=torch.float32
        ),
        "load_quantized": copy.deepcopy(model),
        "load_quantized on meta": empty,
    }
    load_quantized(loaded["load_quantized"], tmp_path / "saved", on_unsupported="dequantize", progress=False)
    load_quantized(empty, tmp_path / "saved", on_unsupported="dequantize", progress=False)
    expected = run(exact)
    for entry_point, found in loaded.items():
        assert not [name for name, tensor in found.state_dict().items() if tensor.is_meta], entry_point
        assert float((run(found) - expected).norm() / expected.norm()) < 1e-5, entry_point


class Forgetful(LlamaForCausalLM):
    """A model whose class sets a buffer only if the model is created with values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("extra", torch.full((3,), 2.0), persistent=False)


def loads_of(model: Forgetful, path: Path) -> dict[str, Callable[[], object]]:
    """Returns loads by entry point. Each must stop: no file has the buffer, and the class does not set it."""
    exact = checkpoint(model, path / "saved")
    exact.save_pretrained(path / "floats")
    with torch.device("meta"):
        empty = Forgetful(model.config)
    quantized = MarlinConfig("uint4", 32)
    return {
        "from_pretrained": lambda: Forgetful.from_pretrained(path / "saved"),
        "floats": lambda: Forgetful.from_pretrained(path / "floats", quantization_config=quantized),
        "meta": lambda: load_quantized(empty, path / "saved", progress=False),
    }


@pytest.mark.parametrize("entry_point", ["from_pretrained", "floats", "meta"])
def test_a_tensor_that_nobody_sets_stops_the_load(entry_point, tmp_path) -> None:
    torch.manual_seed(0)
    model = Forgetful(LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    load = loads_of(model, tmp_path)[entry_point]
    message = "Forgetful: the tensors extra are in no checkpoint, and the model's class does not compute them"
    with pytest.raises(ModelMismatchError, match=message):
        load()
    load_quantized(model, tmp_path / "saved", progress=False)  # in this model, the class has set the buffer
    assert torch.equal(model.extra, torch.full((3,), 2.0))
