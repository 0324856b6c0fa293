"""Writes the README's table of models and Macs, computed as the command `fit` computes memory, from the models' sizes.

    python -m scripts.memory_table --write

The sizes are those of the models' `config.json` on the Hugging Face Hub. No file of a model is needed.
"""

from pathlib import Path

import torch
from transformers import (
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from scripts import page_section

README = Path(__file__).resolve().parents[1] / "README.md"
MACS = (8, 16, 24, 32, 48, 64, 96, 128, 192)  # GB
CONTEXT, PROMPT = 8192, 512  # tokens
TYPES = {"4 bit": "uint4b8", "8 bit": "uint8b128", "16 bit": "floats"}


def sizes(hidden: int, inner: int, layers: int, heads: int, kv: int, head: int, vocabulary: int) -> dict[str, int]:
    """Returns settings that the configs of all these models have."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(
        zip((*names, "head_dim", "vocab_size"), (hidden, inner, layers, heads, kv, head, vocabulary), strict=True)
    )


MODELS: dict[str, PreTrainedConfig] = {
    "Qwen3-4B": Qwen3Config(**sizes(2560, 9728, 36, 32, 8, 128, 151936), tie_word_embeddings=True),
    "Llama-3.1-8B": LlamaConfig(**sizes(4096, 14336, 32, 32, 8, 128, 128256)),
    "gpt-oss-20b": GptOssConfig(**sizes(2880, 2880, 24, 64, 8, 64, 201088), num_local_experts=32),
    "Mistral-Small-24B": MistralConfig(**sizes(5120, 32768, 40, 32, 8, 128, 131072), sliding_window=None),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        **sizes(2048, 6144, 48, 32, 4, 128, 151936), moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    ),
    "Llama-3.3-70B": LlamaConfig(**sizes(8192, 28672, 80, 64, 8, 128, 128256)),
}


def row(config: PreTrainedConfig) -> list[str]:
    """Returns a model's cells: the memory of weights, cache and activations, and the smallest Mac that has it."""
    from torch_marlin_metal.cli.models.fit import empty_model, gpu_memory, measured
    from torch_marlin_metal.models.report import module_bytes

    made = {name: empty_model(config, torch.bfloat16, name) for name in TYPES.values()}
    beside = sum(measured("", made["uint4b8"], CONTEXT, PROMPT))
    cells = []
    for model in made.values():
        total = module_bytes(model) + beside
        mac = next((size for size in MACS if gpu_memory(f"{size}GB") >= total), None)
        cells.append(f"{total / 1e9:.1f} GB, {f'Mac of {mac} GB' if mac else 'no Mac'}")
    return cells


def table() -> str:
    """Returns the rows of all models, in Markdown."""
    lines = [f"| model | {' | '.join(TYPES)} |", "|---|" + "---|" * len(TYPES)]
    lines += [f"| {name} | {' | '.join(row(config))} |" for name, config in MODELS.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    page_section.main(README, "scripts.memory_table", table)
