"""The names and values that mlx-lm changes when it converts a checkpoint of transformers, and how to change them back.

Source: the methods `sanitize` of mlx_lm/models/*.py (mlx-lm 0.32.2).
"""

import re

from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint

# mlx-lm's modules that hold all experts of a layer; each part of them is a stack.
STACKS = re.compile(r"(?:\.switch_mlp|\.experts\.switch_glu|\.experts)\.(gate_proj|up_proj|down_proj)$")
# In models with images: regular expressions for mlx-lm's prefixes of the language model, and transformers' prefixes.
PREFIXES = ((r"^language_model\.model\.", "model.language_model."), (r"^language_model\.lm_head\.", "lm_head."))
# Model type -> regular expressions for the ends of mlx-lm's layer names, and transformers' ends.
ENDINGS = {
    "laguna": ((r"\.mlp\.gate\.proj$", ".mlp.gate"),),
    "lfm2_moe": tuple(
        (rf"\.feed_forward\.{own}$", f".feed_forward.{theirs}")
        for own, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    ),
}
# mlx-lm splits `kv_b_proj` of latent attention into the keys' part, with rows and columns of each head swapped, and
# the values' part. Both are stacks of heads.
KEYS, VALUES, LATENT = ".embed_q", ".unembed_out", ".kv_b_proj"
CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")  # transformers: [C, 1, width], mlx-lm: [C, width, 1]
# transformers multiplies with 1 + weight, and mlx-lm stores the sum.
SHIFTED = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
SHIFTING = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # model types


def hf_name(checkpoint: Checkpoint, name: str, expert: int | None = None) -> str:
    """Returns the name that a tensor or a layer has in checkpoints of transformers.

    Args:
        checkpoint: a directory of mlx-lm.
        name: the name in it.
        expert: for a stack of experts, the index in the stack.
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
    """Returns the changes of the beginnings of names."""
    return () if checkpoint.config.get("model_type") == "llama4" else PREFIXES  # transformers has mlx-lm's names there


def latent(checkpoint: Checkpoint, base: str) -> tuple[str, str] | None:
    """Returns (transformers layer, stack of values) for a stack of keys, ("", "") for a stack of values, else None."""
    if base.endswith(VALUES):
        return "", ""
    owner = base.removesuffix(KEYS)
    return None if owner == base else (hf_name(checkpoint, owner + LATENT), owner + VALUES)


def shift(checkpoint: Checkpoint, name: str) -> float:
    """Returns the number that mlx-lm added to all values of a tensor."""
    return 1.0 if checkpoint.config.get("model_type") in SHIFTING and name.endswith(SHIFTED) else 0.0


def hf_values(checkpoint: Checkpoint, name: str, values: Tensor) -> Tensor:
    """Returns the values that a tensor has in checkpoints of transformers."""
    if name.endswith(CONVOLUTIONS) and values.dim() == 3 and values.shape[2] == 1:
        return values.mT.contiguous()
    return values - shift(checkpoint, name) if values.dim() == 1 and shift(checkpoint, name) else values
