"""The meaning of GGUF metadata keys for a transformers model.

`KEYS` has each key that the package gguf can write in the namespace of an architecture. The namespace is omitted:
"llama.rope.freq_base" is "rope.freq_base". For a key that changes a model's results, `KEYS` names the settings in
transformers' configs. A key for another kind of model has no setting, and a file with such a key is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.files.gguf import GgufTensor, SkippedArray


@dataclass(frozen=True)
class Key:
    """The meaning of one metadata key.

    Attributes:
        settings: names of the setting in transformers' configs. The first name that a config has is used.
        neutral: values with the same meaning as an absent key. A config without the setting agrees with these values.
        off: the value that the setting must have if the key is absent or neutral.
        size: True if the shapes of the tensors determine the value. Loading compares the shapes instead of the key.
        special: True if `models.gguf_special` or `models.gguf_rope` has its own code for the key.
        harmless: the reason why the key does not change the results of a model, or "".
    """

    settings: tuple[str, ...] = ()
    neutral: tuple[Any, ...] = ()
    off: Any = None
    size: bool = False
    special: bool = False
    harmless: str = ""


ABSENT = Key(neutral=(0, False))
ROPE = Key(special=True)
KEYS: dict[str, Key] = {
    # Sizes
    "vocab_size": Key(harmless="the embedding's shape counts"),
    "embedding_length": Key(("hidden_size",), size=True),
    "block_count": Key(special=True, size=True),
    "feed_forward_length": Key(special=True, size=True),
    "expert_count": Key(("num_local_experts", "num_experts"), (0,), 0),
    "expert_feed_forward_length": Key(("moe_intermediate_size", "intermediate_size"), (0,), size=True),
    "expert_shared_feed_forward_length": Key(
        ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
        (0,),
        size=True,
    ),
    "expert_shared_count": Key(("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), (0,), size=True),
    "leading_dense_block_count": Key(
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), size=True, special=True
    ),
    "moe_latent_size": Key(("moe_latent_size",), (0,), size=True),
    "interleave_moe_layer_step": Key(harmless="the names of the tensors say it"),
    "moe_every_n_layers": Key(harmless="the names of the tensors say it"),
    "nextn_predict_layers": Key(harmless="transformers' models lack these blocks, which are left out"),
    "embedding_length_per_layer_input": Key(("hidden_size_per_layer_input",), (0,), 0, size=True),
    # Attention
    "attention.head_count": Key(("num_attention_heads",), (0,)),
    "attention.head_count_kv": Key(special=True),
    "attention.key_length": Key(special=True),
    "attention.value_length": Key(special=True),
    "attention.key_length_swa": Key(special=True),
    "attention.value_length_swa": Key(special=True),
    "attention.key_length_mla": Key(special=True),
    "attention.value_length_mla": Key(special=True),
    "attention.q_lora_rank": Key(("q_lora_rank",), (0,)),
    "attention.kv_lora_rank": Key(("kv_lora_rank",), (0,)),
    "attention.layer_norm_epsilon": Key(
        ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    ),
    "attention.layer_norm_rms_epsilon": Key(
        ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    ),
    "attention.scale": Key(special=True),
    "attention.sliding_window": Key(("sliding_window", "attention_chunk_size", "local_attention"), (0,)),
    "attention.sliding_window_pattern": Key(special=True),
    "attention.clamp_kqv": Key(special=True),
    "attention.shared_kv_layers": Key(("num_kv_shared_layers",), (0,), 0),
    "full_attention_interval": Key(special=True),
    "attention.causal": Key(special=True),
    "attention.indexer.head_count": Key(("index_n_heads",), (0,)),
    "attention.indexer.key_length": Key(("index_head_dim",), (0,)),
    "attention.indexer.top_k": Key(("index_topk",), (0,)),
    "attention.max_alibi_bias": Key(special=True),
    "attention.temperature_scale": Key(special=True),
    "attention.temperature_length": Key(("floor_scale",), (0,)),
    "attention.relative_buckets_count": Key(("relative_attention_num_buckets",), (0,)),
    "attn_logit_softcapping": Key(("attn_logit_softcapping",), (0,)),
    "final_logit_softcapping": Key(("final_logit_softcapping",), (0,)),
    "use_parallel_residual": Key(special=True),
    "shortconv.l_cache": Key(("conv_L_cache",), (0,)),
    # Linear attention and states
    "ssm.conv_kernel": Key(("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"), (0,)),
    "ssm.state_size": Key(("linear_key_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), (0,)),
    "ssm.group_count": Key(("linear_num_key_heads", "mamba_n_groups", "n_groups"), (0,)),
    "ssm.time_step_rank": Key(
        ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "num_heads", "mamba_dt_rank", "time_step_rank"),
        (0,),
    ),
    "ssm.inner_size": Key(special=True),
    "ssm.dt_b_c_rms": Key(special=True),
    # Multipliers
    "logit_scale": Key(("logit_scale", "logits_scaling"), (0, 1), 1.0),
    "residual_scale": Key(("residual_multiplier",), (0, 1), 1.0),
    "embedding_scale": Key(("embedding_multiplier",), (0, 1), 1.0),
    # Experts
    "expert_used_count": Key(("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk"), (0,)),
    "expert_weights_norm": Key(special=True),
    "expert_weights_scale": Key(("routed_scaling_factor", "route_scale"), (0, 1), 1.0),
    "expert_gating_func": Key(special=True),
    "expert_group_count": Key(("n_group",), (0, 1), 1),
    "expert_group_used_count": Key(("topk_group",), (0, 1), 1),
    # Rotary embedding
    "rope.dimension_count": ROPE,
    "rope.dimension_count_swa": ROPE,
    "rope.dimension_sections": Key(special=True),
    "rope.freq_base": ROPE,
    "rope.freq_base_swa": ROPE,
    "rope.scale_linear": ROPE,  # the name of rope.scaling.factor in files of 2023
    "rope.scaling.type": ROPE,
    "rope.scaling.factor": ROPE,
    "rope.scaling.attn_factor": ROPE,
    "rope.scaling.original_context_length": ROPE,
    "rope.scaling.yarn_log_multiplier": ROPE,
    "rope.scaling.yarn_ext_factor": ROPE,
    "rope.scaling.yarn_attn_factor": ROPE,
    "rope.scaling.yarn_beta_fast": ROPE,
    "rope.scaling.yarn_beta_slow": ROPE,
    "rope.scaling.finetuned": Key(special=True),
    # Without influence on a forward pass
    "context_length": Key(harmless="it is a recommendation; rope.scaling.* says what depends on it"),
    "pooling_type": Key(harmless="a program pools a model's outputs"),
    "classifier.output_labels": Key(harmless="they are names"),
    "tensor_data_layout": Key(special=True),
    "n_deepstack_layers": Key(harmless="only images take part in it"),
    # Gemma 3n
    "altup.active_idx": Key(("altup_active_idx",), (0,), 0),
    "altup.num_inputs": Key(("altup_num_inputs",), (0,)),
    "activation_sparsity_scale": Key(special=True),
    # Keys of other kinds of models
    **dict.fromkeys(
        (
            "embedding_length_out",
            "features_length",
            "expert_chunk_feed_forward_length",
            "expert_group_scale",
            "experts_per_group",
            "decoder_start_token_id",
            "decoder_block_count",
            "router_logit_softcapping",
            "swin_norm",
            "rescale_every_n_layers",
            "time_mix_extra_dim",
            "time_decay_extra_dim",
            "token_shift_count",
            "swiglu_clamp_exp",
            "swiglu_clamp_shexp",
            "attention.group_norm_epsilon",
            "attention.group_norm_groups",
            "attention.decay_lora_rank",
            "attention.iclr_lora_rank",
            "attention.value_residual_mix_lora_rank",
            "attention.gate_lora_rank",
            "attention.output_scale",
            "rope.scaling.alpha",
            "kda.head_dim",
            "wkv.head_size",
            "posnet.embedding_length",
            "posnet.block_count",
            "convnext.embedding_length",
            "convnext.block_count",
        ),
        ABSENT,
    ),
}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class FileSettings:
    """The keys and tensors of a GGUF file that describe the model.

    Attributes:
        architecture: the first part of each key's name.
        values: values by key, without the architecture's name: numbers, texts, lists of numbers, or `SkippedArray`. A
            list of equal numbers, one for each layer, becomes one number.
        tensors: the tensors of the file.
    """

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
        self.architecture = str(metadata.get("general.architecture", ""))
        prefix = f"{self.architecture}."
        stated = {key: value for key, value in metadata.items() if key.startswith(prefix)}
        self.values = {key.removeprefix(prefix): _value(key, value) for key, value in stated.items()}
        self.tensors = tensors

    def full(self, key: str) -> str:
        """Returns a key's complete name in the file."""
        return f"{self.architecture}.{key}"

    def number(self, key: str) -> float | None:
        """Returns the number stored under a key, or None if the file lacks the key.

        Raises:
            CheckpointError: the value is not one finite number.
        """
        value = self.values.get(key)
        if value is None or (isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)):
            return value
        raise CheckpointError(f"{self.full(key)}: expected one finite number, got {shown(value)}")

    def unknown(self) -> list[str]:
        """Returns the complete names of the keys that are not in `KEYS`."""
        return [self.full(key) for key in self.values if key not in KEYS]

    def factors(self, name: str) -> Tensor | None:
        """Returns a tensor of rotary factors in fp64 `[D / 2]`, or None if the file lacks the tensor."""
        tensor = self.tensors.get(name)
        return tensor.read().double().flatten() if tensor is not None and tensor.is_plain else None

    def has(self, ending: str) -> bool:
        """Returns True if the first block has the tensor, for example "attn_q.bias"."""
        return f"blk.0.{ending}" in self.tensors


def _value(key: str, value: Any) -> Any:
    if isinstance(value, memoryview):
        numbers = value.tolist()
        return numbers[0] if numbers and len(set(numbers)) == 1 and not key.endswith("_pattern") else numbers
    return value


def shown(value: Any) -> str:
    """Formats a value for an error message: floats with the digits of fp32, long lists shortened."""
    if isinstance(value, SkippedArray):
        return f"an array of {value.count}"
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list | tuple):
        parts = [shown(item) for item in value[:4]] + [f"... ({len(value)} numbers)"] * (len(value) > 4)
        return f"[{', '.join(parts)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {shown(item)}" for name, item in value.items()) + "}"
    return repr(value)


def same(first: Any, second: Any) -> bool:
    """Returns True if two settings are equal. Numbers may differ by the rounding of fp32."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (first, second))
    if numbers:
        return math.isclose(first, second, rel_tol=2 * torch.finfo(torch.float32).eps)
    return bool(first == second)
