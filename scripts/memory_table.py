"""Writes the README's table of models and Macs, and a picture of the table. Memory is computed as in the command `fit`.

    python -m scripts.memory_table --write

The sizes come from the models' `config.json` on the Hugging Face Hub. No weights are needed.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from scripts import page_section

ROOT = Path(__file__).resolve().parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs/images/memory.svg"
NAME = "scripts.memory_table"
MACS = (8, 16, 24, 32, 48, 64, 96, 128, 192)  # GB
CONTEXT, PROMPT = 8192, 512  # tokens
FILES: dict[str, dict[str, Any] | None] = {
    "Q4_K_M": {"like": "Q4_K_M"},
    "Q8_0": {"like": "Q8_0"},
    "16 bit": None,
}
# gpt-oss is published with experts in MXFP4 and everything else in 16 bits. Its GGUF files keep the experts in MXFP4.
PUBLISHED = {"weight_format": "mxfp4", "vocabulary_format": "none", "modules_to_not_convert": ["self_attn"]}


def sizes(hidden: int, inner: int, layers: int, heads: int, kv: int, head: int, vocabulary: int) -> dict[str, int]:
    """Returns the config settings that all these models share."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(
        zip((*names, "head_dim", "vocab_size"), (hidden, inner, layers, heads, kv, head, vocabulary), strict=True)
    )


MODELS: dict[str, PreTrainedConfig] = {
    "Qwen3-4B": Qwen3Config(**sizes(2560, 9728, 36, 32, 8, 128, 151936), tie_word_embeddings=True),
    "Qwen3-8B": Qwen3Config(**sizes(4096, 12288, 36, 32, 8, 128, 151936), tie_word_embeddings=False),
    "Llama-3.1-8B": LlamaConfig(**sizes(4096, 14336, 32, 32, 8, 128, 128256)),
    "gpt-oss-20b": GptOssConfig(**sizes(2880, 2880, 24, 64, 8, 64, 201088), num_local_experts=32),
    "Mistral-Small-24B": MistralConfig(**sizes(5120, 32768, 40, 32, 8, 128, 131072), sliding_window=None),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        **sizes(2048, 6144, 48, 32, 4, 128, 151936), moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    ),
    "Llama-3.3-70B": LlamaConfig(**sizes(8192, 28672, 80, 64, 8, 128, 128256)),
}


def loaded(config: PreTrainedConfig, options: dict[str, Any] | None) -> Any:
    """Returns a model on the meta device, with the formats of `MarlinConfig(**options)`, or in 16 bits for None."""
    from torch_marlin_metal.integrations.transformers import MarlinConfig, MarlinQuantizer

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if options is not None:
        MarlinQuantizer(MarlinConfig(**options), pre_quantized=False).quantize_empty(model)
    return model


def row(config: PreTrainedConfig) -> list[str]:
    """Returns a model's cells: the memory of weights, cache and activations, and the smallest Mac with that memory."""
    from torch_marlin_metal.cli.models.fit import gpu_memory, measured
    from torch_marlin_metal.models.report import module_bytes

    is_published = isinstance(config, GptOssConfig)
    models = [
        loaded(config, PUBLISHED if is_published and file == "Q4_K_M" else options) for file, options in FILES.items()
    ]
    beside = sum(measured("", models[0], CONTEXT, PROMPT))
    cells = []
    for model in models:
        total = module_bytes(model) + beside
        mac = next((size for size in MACS if gpu_memory(f"{size}GB") >= total), None)
        cells.append(f"{total / 1e9:.1f} GB, {f'Mac of {mac} GB' if mac else 'no Mac'}")
    if is_published:
        cells[0] += " (MXFP4)"
    return cells


def table() -> str:
    """Returns the rows of all models, in Markdown."""
    lines = [f"| model | {' | '.join(FILES)} |", "|---|" + "---|" * len(FILES)]
    lines += [f"| {name} | {' | '.join(row(config))} |" for name, config in MODELS.items()]
    return "\n".join(lines)


def picture(rows: str) -> str:
    """Returns an SVG of a table: for each model and Mac, the largest file that fits."""
    width, height, left, top = 62, 30, 150, 58
    macs = MACS[:-1]
    colors = dict(zip(FILES, ("#a5d8ff", "#74c0fc", "#339af0"), strict=True))
    models = [line.strip("| ").split(" | ") for line in rows.splitlines()[2:]]
    size = left + width * len(macs) + 16, top + height * len(models) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        'font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="12" fill="#1f2328">',
        "  <title>The largest file of each model that fits into each Mac, with 8,192 tokens of context</title>",
        f'  <rect width="{size[0]}" height="{size[1]}" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
        '  <text x="16" y="24" font-size="14" font-weight="bold">The largest file that fits</text>',
        f'  <text x="16" y="{top - 10}">memory of the Mac</text>',
    ]
    for index, mac in enumerate(macs):
        x = left + width * index + width / 2
        parts.append(f'  <text x="{x:g}" y="{top - 10}" text-anchor="middle" font-weight="bold">{mac} GB</text>')
    for line, (model, *cells) in enumerate(models):
        y = top + height * line
        parts.append(f'  <text x="16" y="{y + 20}">{model}</text>')
        least = [int(cell.split("Mac of ")[1].split()[0]) if "Mac of" in cell else max(MACS) + 1 for cell in cells]
        for index, mac in enumerate(macs):
            fitting = [file for file, needed in zip(FILES, least, strict=True) if needed <= mac]
            x, file = left + width * index, fitting[-1] if fitting else ""
            text = "MXFP4" if file == "Q4_K_M" and "MXFP4" in cells[0] else file or "-"
            parts.append(
                f'  <rect x="{x + 2}" y="{y + 2}" width="{width - 4}" height="{height - 4}" rx="4" '
                f'fill="{colors.get(file, "#f1f3f5")}"/>'
            )
            parts.append(f'  <text x="{x + width / 2:g}" y="{y + 20}" text-anchor="middle">{text}</text>')
    note = "with 8,192 tokens of context; computed, not measured"
    parts += [f'  <text x="16" y="{size[1] - 14}" fill="#57606a">{note}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    page_section.main(README, NAME, table)
    if "--write" in sys.argv:
        PICTURE.write_text(picture(page_section.section(README, NAME)))
