"""Restores the names and values that mlx-lm changed when it converted a transformers checkpoint.

Source: the methods `sanitize` of mlx_lm/models/*.py (mlx-lm 0.32.2).
"""

import re

from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint

# mlx-lm's modules for all experts of a layer. Each projection in such a module is a stack of matrices.
STACKS = re.compile(r"(?:\.switch_mlp|\.experts\.switch_glu|\.experts)\.(gate_proj|up_proj|down_proj)$")
# For models with images: (regular expression for mlx-lm's prefix of the language model, transformers' prefix).
PREFIXES = ((r"^language_model\.model\.", "model.language_model."), (r"^language_model\.lm_head\.", "lm_head."))
# Model type -> (regular expression for the end of mlx-lm's layer name, transformers' end).
ENDINGS = {
    "laguna": ((r"\.mlp\.gate\.proj$", ".mlp.gate"),),
    "lfm2_moe": tuple(
        (rf"\.feed_forward\.{own}$", f".feed_forward.{theirs}")
        for own, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    ),
}
# mlx-lm splits `kv_b_proj` of latent attention into two stacks of heads. The stack for keys has the rows and columns of
# each head swapped.
KEYS, VALUES, LATENT = ".embed_q", ".unembed_out", ".kv_b_proj"
CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")  # transformers: [C, 1, width], mlx-lm: [C, width, 1]
# Weights of norms that multiply by 1 + weight in transformers. mlx-lm stores 1 + weight.
SHIFTED = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
SHIFTING = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # model types


def hf_name(checkpoint: Checkpoint, name: str, expert: int | None = None) -> str:
    """Returns the name of a tensor or layer in transformers' checkpoints.

    Args:
        checkpoint: a directory that mlx-lm wrote.
        name: the name in the directory.
        expert: the index in a stack of experts, or None for other tensors.
    """
    for pattern, new in prefixes(checkpoint):
        name = re.sub(pattern, new, f"{name}.").removesuffix(".")
    for pattern, new in ENDINGS.get(str(checkpoint.config.get("model_type")), ()):
        name = re.sub(pattern, new, name)
    if expert is None:
        return name
    found = STACKS.search(name)
    return f"{name}.{expert}" if found is None else f"{name[: found.start()]}.experts.{expert}.{found[1]}"


def prefixes(checkpoint: Checkpoint) -> tuple[tuple[str, str], ...]:
    """Returns pairs (regular expression, replacement) for the beginnings of names."""
    return () if checkpoint.config.get("model_type") == "llama4" else PREFIXES  # mlx-lm keeps llama4's prefixes


def latent(checkpoint: Checkpoint, base: str) -> tuple[str, str] | None:
    """Returns (transformers layer, stack of values) for a stack of keys, ("", "") for a stack of values, else None."""
    if base.endswith(VALUES):
        return "", ""
    owner = base.removesuffix(KEYS)
    return None if owner == base else (hf_name(checkpoint, owner + LATENT), owner + VALUES)


def shift(checkpoint: Checkpoint, name: str) -> float:
    """Returns the number that mlx-lm added to each value of a tensor."""
    return 1.0 if checkpoint.config.get("model_type") in SHIFTING and name.endswith(SHIFTED) else 0.0


def hf_values(checkpoint: Checkpoint, name: str, values: Tensor) -> Tensor:
    """Returns the values of a tensor in transformers' checkpoints."""
    if name.endswith(CONVOLUTIONS) and values.dim() == 3 and values.shape[2] == 1:
        return values.mT.contiguous()
    return values - shift(checkpoint, name) if values.dim() == 1 and shift(checkpoint, name) else values
