"""Whole models in GGUF files, of each architecture with a table of names: names, values, and mixed files."""

import warnings

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.llama import MODELS, write_gguf
from torch_marlin_metal import MarlinExperts, MarlinLinear, convert, load_quantized
from torch_marlin_metal.checkpoints.formats.gguf_names import ARCHITECTURES
from torch_marlin_metal.integrations import transformers
from torch_marlin_metal.integrations.transformers import gguf as integration

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
SIZES |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SIZES |= {"shared_expert_intermediate_size": 96, "use_qk_norm": False}
SIZES |= {"intermediate_size_mlp": 96, "moe_layers": [1], "bos_token_id": 1}
# (architecture in files, model type of transformers)
FAMILIES = [(name, name) for name in ARCHITECTURES] + [("llama", "mixtral")]
TYPES = {
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "llama4": "llama4_text",
}
TYPES |= {"phi2": "phi", "command-r": "cohere"}
REORDERED = ("llama", "granite", "smollm3")
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
IDS = torch.tensor([[3, 9, 27, 41, 5]])


def model_of(family: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(TYPES.get(family, family), **SIZES)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter))
    return model


def write(path, architecture: str, model, kinds=lambda name: "Q4_0"):
    """Writes a model under the names of gguf's own table, and gives the model the decoded values."""
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, 2)
    writer = GGUFWriter(path, architecture)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)

    def quantized(target: str, tensor: torch.Tensor) -> np.ndarray:
        """Sets the decoded values in the model, and returns them."""
        kind = GGMLQuantizationType[kinds(target)]
        tensor.copy_(torch.from_numpy(dequantize(quantize(tensor.numpy().copy(), kind), kind)))
        return tensor.numpy()

    def add(target: str, values: np.ndarray) -> None:
        kind = GGMLQuantizationType[kinds(target)]
        writer.add_tensor(target, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)

    def add_experts(name: str, tensor: torch.Tensor) -> None:
        """Writes gate, up and down of all experts.

        Those of gpt-oss and llama4 are `[E, K, N]`. In gpt-oss, gate and up alternate.
        """
        block, alternates = name.split(".")[2], architecture == "gpt-oss"
        parts = ("gate", "up") if "gate_up" in name else ("down",)
        if name.endswith("_bias"):
            for number, part in enumerate(parts):
                rows = tensor[:, number :: len(parts)] if alternates else tensor.chunk(len(parts), 1)[number]
                writer.add_tensor(f"blk.{block}.ffn_{part}_exps.bias", rows.contiguous().numpy())
            return
        transposed = architecture in ("gpt-oss", "llama4")
        stack = tensor.mT.contiguous() if transposed else tensor
        for number, part in enumerate(parts):
            rows = stack[:, number :: len(parts)] if alternates else stack.chunk(len(parts), 1)[number]
            target = f"blk.{block}.ffn_{part}_exps.weight"
            own = rows.contiguous()
            add(target, quantized(target, own))
            rows.copy_(own)
        if transposed:
            tensor.copy_(stack.mT)

    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        if ".experts." in name:
            add_experts(name, tensor)
            continue
        module, _, part = name.rpartition(".")
        if name.endswith("self_attn.sinks"):
            writer.add_tensor(f"{names.get_name(name)}.weight", tensor.numpy())
            continue
        target = f"{names.get_name(module)}.{part}"
        if tensor.dim() == 1 or "ffn_gate_inp" in target:  # llama.cpp keeps routers in fp32
            offset = architecture in NORMS_PLUS_ONE and name.endswith("norm.weight")
            writer.add_tensor(target, tensor.numpy().squeeze() + offset)
            continue
        values = quantized(target, tensor)
        if architecture in REORDERED and module.endswith(("q_proj", "k_proj")):
            values = values.reshape(-1, 2, 16, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        add(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("architecture", "family"), FAMILIES)
def test_a_model_computes_what_its_decoded_weights_compute(architecture, family, tmp_path) -> None:
    model = model_of(family)
    path = write(tmp_path / "model.gguf", architecture, model)
    loaded = model_of(family)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    if architecture == "llama4":
        with pytest.warns(
            UserWarning,
            match="experts of 1 layers are decoded to floats: Llama4TextExperts computes something else than Marlin",
        ):
            load_quantized(loaded, path, progress=False)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_quantized(loaded, path, progress=False)
    stacks = [module for module in loaded.modules() if isinstance(module, MarlinExperts)]
    packs = architecture != "llama4" and any(".experts." in name for name in model.state_dict())
    assert len(stacks) == 2 * packs
    assert sum(isinstance(module, MarlinLinear) for module in loaded.modules()) >= 8
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_plain_projections_get_back_the_order_of_their_rows(tmp_path) -> None:
    """Mixed files keep some matrices in 16 bit, and llama.cpp reorders the rows of q and k in these, too."""
    model = model_of("llama")
    path = write(
        tmp_path / "m.gguf", "llama", model, lambda name: "F16" if "attn_q" in name or "attn_k" in name else "Q4_0"
    )
    loaded = model_of("llama")
    load_quantized(loaded, path, progress=False)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    stored = convert.open_reader(path).tensors["blk.0.attn_q.weight"].read()
    assert not torch.equal(stored.float(), model.model.layers[0].self_attn.q_proj.weight)


def mixed(name: str) -> str:
    return "Q8_0" if "attn_v" in name or "token_embd" in name else "Q5_0" if "ffn_down" in name else "Q4_0"


def test_a_mixed_file_says_its_share_and_loads(tmp_path) -> None:
    model = model_of("llama")
    path = write(tmp_path / "model.gguf", "llama", model, mixed)
    stored = {tensor.name: tensor for tensor in convert.open_reader(path).tensors.values() if not tensor.is_plain}
    other = [tensor for name, tensor in stored.items() if mixed(name) != "Q4_0"]
    share = sum(tensor.nbytes for tensor in other) / sum(tensor.nbytes for tensor in stored.values())
    loaded = model_of("llama")
    with pytest.warns(
        UserWarning, match=rf"{share:.0%} of the bytes .* not 4 bit: Q5_0 \(\d+%\), Q8_0 \(\d+%\)\. They"
    ):
        load_quantized(loaded, path, progress=False)
    assert type(loaded.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert isinstance(loaded.model.layers[0].mlp.up_proj, MarlinLinear)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    numbers = sum(np.prod(tensor.shape) for tensor in other)
    assert f"{2 * numbers / 1e6:.0f} MB in 16 bit" in convert.open_reader(path).mixture()
    with pytest.raises(convert.UnsupportedFormat, match="is not a 4-bit type that is read"):
        load_quantized(model_of("llama"), path, on_unsupported="error", progress=False)


@pytest.mark.parametrize(("architecture", "family"), [("qwen3moe", "qwen3_moe"), ("gpt-oss", "gpt_oss")])
def test_experts_of_a_mixed_file_become_floats(architecture, family, tmp_path) -> None:
    """llama.cpp's Q4_K_M keeps some down projections in more bits. Experts are packed whole or not at all."""
    model = model_of(family)
    path = write(
        tmp_path / "m.gguf", architecture, model, lambda name: "Q8_0" if "blk.1.ffn_down_exps" in name else "Q4_0"
    )
    loaded = model_of(family)
    with pytest.warns(UserWarning, match=r"not 4 bit: Q8_0 \(\d+%\)\. They"):
        report = load_quantized(loaded, path, progress=False)
    packed, floats = (layer.mlp.experts for layer in loaded.model.layers)
    assert isinstance(packed, MarlinExperts) and not isinstance(floats, MarlinExperts)
    (left,) = [layer for layer in report.left if "experts" in layer.name]
    assert left.name == "model.layers.1.mlp.experts" and left.reason.startswith("decoded to floats: ")
    for name, parameter in floats.named_parameters():
        assert torch.equal(parameter, model.model.layers[1].mlp.experts.get_parameter(name)), name
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(convert.UnsupportedFormat, match="Q8_0 is not a 4-bit type that is read"):
        load_quantized(model_of(family), path, on_unsupported="error", progress=False)


def test_from_pretrained_says_it_and_loads(tmp_path, monkeypatch) -> None:
    _, weights = write_gguf(tmp_path / "tiny.gguf", MODELS / "auto-round-asym-g32", "Q4_0", embedding="Q8_0")
    told: list[str] = []
    monkeypatch.setattr(integration.logger, "warning", told.append)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float16)
    assert len(told) == 1 and "of the bytes of its matrices are not 4 bit: Q8_0 (" in told[0]
    table = model.model.embed_tokens
    assert type(table) is torch.nn.Embedding and table.weight.dtype == torch.float16
    assert torch.equal(table.weight, torch.from_numpy(weights["model.embed_tokens"]).half())
    assert isinstance(model.model.layers[0].mlp.up_proj, MarlinLinear)
    transformers.take_over(on_unsupported="error")
    try:
        with pytest.raises(convert.UnsupportedFormat, match="Q8_0 is not a 4-bit type"):
            AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    finally:
        transformers.take_over()
