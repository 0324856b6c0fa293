"""Tiny models of transformers of each architecture of GGUF files, and their files, by the rules of llama.cpp."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from torch_marlin_metal.checkpoints.formats.gguf_names import ARCHITECTURES

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


def model_of(family: str, **settings: Any) -> nn.Module:
    """Returns a model of a family with random weights, the same at each call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(TYPES.get(family, family), **SIZES | settings)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter))
    return model


def write(
    path: Path,
    architecture: str,
    model: Any,
    kinds: Callable[[str], str] = lambda name: "Q4_0",
    states: Callable[[GGUFWriter], Any] = lambda writer: None,
) -> Path:
    """Writes a model under the names of gguf's own table, and gives the model the decoded values.

    Args:
        path: the file to write.
        architecture: the name of the architecture in the file.
        model: a model in fp32.
        kinds: returns the type in which to store a tensor, by its name in the file.
        states: adds metadata and further tensors; called before the model's tensors are added.
    """
    config = model.config
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    writer = GGUFWriter(path, architecture)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    states(writer)

    def reordered(module: str, values: np.ndarray) -> np.ndarray:
        """Puts the two rows of each rotary pair side by side, where llama.cpp's converter does."""
        if architecture not in REORDERED or not module.endswith(("q_proj", "k_proj")):
            return values
        heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

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
            writer.add_tensor(target, reordered(module, tensor.numpy().squeeze()) + offset)
            continue
        add(target, reordered(module, quantized(target, tensor)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
