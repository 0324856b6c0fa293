"""Writes the package's file `gguf_table.py`: the names in transformers of the tensors in GGUF files.

The names come from the table of the package gguf and from the state dicts of transformers' model classes. `SILENT`
lists the few names that gguf's table lacks. `MODEL_TYPES` lists the architectures whose names differ in the two
packages.

    python scripts/gguf_table.py --write
"""

import argparse
import re
import sys
import textwrap
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTextEncoding,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING_NAMES

FILE = Path(__file__).parents[1] / "torch_marlin_metal" / "checkpoints" / "formats" / "gguf_table.py"
BLOCKS = 8
# The architectures that the reader supports. tests/checkpoints/test_gguf_models.py must test each of them.
READ = (
    *("llama", "llama4", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gpt-oss"),
    *("gemma", "gemma2", "gemma3", "gemma4", "phi2", "phi3", "starcoder2", "stablelm", "olmo2", "olmoe"),
    *("command-r", "granite", "smollm3", "nemotron", "cohere2", "granitemoe", "arcee", "olmo", "seed_oss", "ernie4_5"),
    *("exaone4", "glm4", "glm4moe", "lfm2", "dots1", "minimax-m2", "hunyuan-dense"),
    *("deepseek2", "qwen3next", "qwen2vl", "qwen3vl", "qwen3vlmoe", "ernie4_5-moe", "lfm2moe", "granitehybrid"),
    *("nemotron_h", "mistral3", "mistral4", "gemma3n", "phimoe", "afmoe", "exaone-moe"),
    *("hunyuan-moe", "falcon-h1", "gpt2", "gptneox", "falcon", "bloom", "mpt", "mamba", "mamba2", "jamba"),
    *("starcoder", "minicpm3", "apertus", "bitnet", "chatglm", "jais2", "glm-dsa"),
    *("bert", "nomic-bert", "modern-bert", "eurobert", "t5encoder"),
)
# The model type in transformers of each architecture whose name differs. The text models of Qwen 2 VL and Qwen 3 VL
# have the types of Qwen 2 and Qwen 3, because for text input they compute the same.
MODEL_TYPES = {"phi2": "phi", "command-r": "cohere", "hunyuan-dense": "hunyuan_v1_dense", "deepseek2": "deepseek_v3"}
MODEL_TYPES |= {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe", "granitehybrid": "granitemoehybrid"}
MODEL_TYPES |= {"mistral3": "ministral3", "hunyuan-moe": "hunyuan_v1_moe"}
MODEL_TYPES |= {"starcoder": "gpt_bigcode", "chatglm": "glm", "glm-dsa": "glm_moe_dsa", "t5encoder": "t5"}
# Settings for classes whose default config lacks a kind of layer, or cannot be built.
HYBRID = {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama4": {"num_hidden_layers": 2, "moe_layers": [1]},
    "gemma4": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "glm4moe": {"use_qk_norm": True},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "hunyuan-dense": {"head_dim": 128},
    "hunyuan-moe": {"head_dim": 128},
    "nemotron": {"num_attention_heads": 48, "num_key_value_heads": 8},
    "deepseek2": {"first_k_dense_replace": 1},
    "lfm2moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "granitehybrid": HYBRID,
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"]},
    "gemma3n": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "falcon-h1": {"mamba_rms_norm": True},
    "falcon": {"new_decoder_architecture": True},
    "glm-dsa": {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2},
    "t5encoder": {"feed_forward_proj": "gated-gelu"},
}
# Prefixes of transformers' names that gguf's table has in another form.
BEGINNINGS = {"nemotron_h": ("model.", "backbone."), "bloom": ("transformer.", "")}
BEGINNINGS |= {"nomic-bert": ("layers.", "model.layers.")}
# Endings of transformers' names that gguf's table lacks, each with its name in GGUF files.
SILENT = {
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mamba.dt_bias": "ssm_dt.bias",
    "dt_proj.bias": "ssm_dt.bias",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.expert_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.weight": "ffn_gate_inp",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.input_linear.weight": "ffn_gate_shexp",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "attn_sub_norm.weight": "attn_sub_norm",
    "ffn_sub_norm.weight": "ffn_sub_norm",
    "correct_output_scale": "altup_correct_scale.weight",
}
# Parameters that files do not contain as tensors: llama.cpp stores them as metadata, or they equal another tensor.
NO_TENSORS = re.compile(r".*\.act_fn\.(alpha_[pn]|beta|eps)|encoder\.embed_tokens\.weight")
ENCODERS = ("bert", "nomic-bert", "modern-bert", "eurobert")  # their files have no head
# Names of one architecture that differ from SILENT and from gguf's table.
OWN = {
    "nomic-bert": {
        **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
        "post_attention_layernorm.weight": "attn_output_norm",
        "post_attention_layernorm.bias": "attn_output_norm",
        "post_mlp_layernorm.weight": "layer_output_norm",
        "post_mlp_layernorm.bias": "layer_output_norm",
    },
}
# Second names of tensors: a file uses either name.
ALSO = {
    **{name: {".attn_k_b": ".attn_kv_b"} for name in ("deepseek2", "mistral4", "glm-dsa")},
    "qwen3next": {".attn_qkv": ".ssm_in"},
    "granitehybrid": {".ffn_gate": ".ffn_gate_shexp", ".ffn_down": ".ffn_down_shexp"},
}
STACKED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)(_bias)?")


def plain(name: str) -> str:
    """Returns a name in lower case, with letters and digits only, to compare names of the two packages."""
    return re.sub("[^a-z0-9]", "", name.lower())


def model_type(architecture: str) -> str:
    own = {plain(kind): kind for kind in MODEL_MAPPING_NAMES}
    name = plain(architecture)
    return MODEL_TYPES.get(architecture) or own.get(f"{name}text") or own[name]


def pairs(architecture: str) -> tuple[str, dict[str, str]]:
    """Returns the name of the module list with the blocks in transformers' model, and a dict of tensor names.

    The dict's keys are gguf's names, and its values are transformers' names.
    """
    config = AutoConfig.for_model(model_type(architecture), **SETTINGS.get(architecture, {}))
    config.num_hidden_layers = min(config.num_hidden_layers, 4)
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    if architecture in ENCODERS:
        auto = AutoModel
    if architecture == "t5encoder":
        auto = AutoModelForTextEncoding
    with torch.device("meta"):
        model = auto.from_config(config)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, BLOCKS)
    silent = SILENT | OWN.get(architecture, {})
    found: dict[str, str] = {}
    blocks = ""
    for tensor in model.state_dict():
        stacked = STACKED.fullmatch(tensor)
        if NO_TENSORS.fullmatch(tensor) or tensor.startswith("pooler.") or (stacked and stacked[1] != "down_proj"):
            continue  # the entry of down_proj covers the other stacked tensors of the experts
        block = re.fullmatch(r"(.*?)\.\d+\.(.*?)(\.weight|\.bias)?", tensor)
        ending = re.search(r"\.(weight|bias)$", tensor)
        module = tensor.removesuffix(ending[0]) if ending else tensor.removesuffix("_bias")
        whole = re.fullmatch(r"(.*)\.\d+", module)
        name = next(
            (name for end, name in silent.items() if f".{tensor}".endswith((f".{end}", f".{end}.weight"))), None
        )
        if name is None:
            name = _of_gguf(names, architecture, module) or _of_gguf(names, architecture, whole[1] if whole else "")
            if name is None and (name := names.get_name(tensor)):
                module, ending = tensor, None  # the tensor's name in files has no ending
            if name is None:
                raise SystemExit(f"{architecture}: gguf has no name for {tensor}; add one to SILENT")
            bare = ending is None and not module.endswith(".weight")
            name += ".weight" * (bare and not stacked and not name.endswith(("ssm_a", "ssm_d")))
            name = re.sub(r"(enc\.)?blk\.\d+\.", ".", name)
        elif block is not None:
            name = f".{name}"
            module = module if ending and not name.endswith((".weight", ".bias")) else tensor
        if whole and not name.startswith("."):
            found[name] = whole[1]
        elif block is not None:
            blocks = block[1]
            found[name] = module.replace(f"{blocks}.{module[len(blocks) + 1 :].split('.')[0]}", "", 1)
        else:
            found[name] = module
    return blocks, found | {name: found[other] for name, other in ALSO.get(architecture, {}).items()}


def _of_gguf(names: Any, architecture: str, module: str) -> str | None:
    own, known = BEGINNINGS.get(architecture, ("", ""))
    other = known + module.removeprefix(own) if module.startswith(own) else module
    return names.get_name(module) or names.get_name(other) or ("output" if module == "lm_head" else None)


def table() -> tuple[dict[str, str], dict[str, tuple[str, dict[str, str]]]]:
    """Returns the names that most architectures share, and for each architecture the names that differ from these."""
    own = {architecture: pairs(architecture) for architecture in READ}
    counts: dict[str, Counter[str]] = {}
    for _, found in own.values():
        for name, module in found.items():
            counts.setdefault(name, Counter())[module] += 1
    common = {name: most for name, each in sorted(counts.items()) for most, count in each.most_common(1) if count > 1}
    differing = {
        architecture: (
            f"{model_type(architecture)}@{blocks}".removesuffix("@model.layers"),
            {name: module for name, module in sorted(found.items()) if common.get(name) != module},
        )
        for architecture, (blocks, found) in own.items()
    }
    return common, differing


def text() -> str:
    common, differing = table()
    made = (
        f"scripts/gguf_table.py makes this file from gguf {version('gguf')} and transformers {version('transformers')}."
    )
    rules = (
        'A name that begins with a dot belongs to a block: ".attn_k" is "blk.0.attn_k", and ".mlp" is '
        '"model.layers.0.mlp", or with "@transformer.h" behind the model type "transformer.h.0.mlp". Names without '
        ".weight or .bias stand for both."
    )
    lines = [
        '"""Names in transformers for the tensors of GGUF files.',
        "",
        *textwrap.wrap(f"{made} {rules}", 118),
        '"""',
        "",
        "# The names that most architectures have.",
        'COMMON = """\\',
        *(f"{name}={module}" for name, module in common.items()),
        '"""',
        "# Architecture in the file, model type of transformers, and the names that differ from COMMON.",
        'TABLE = """\\',
    ]
    for architecture, (kind, names) in differing.items():
        entries = [architecture, kind, *(f"{name}={module}" for name, module in names.items())]
        lines += textwrap.wrap(
            " ".join(entries), 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join([*lines, '"""', ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the file instead of printing it")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    made = text()
    if parser.parse_args().write:
        FILE.write_text(made)
    else:
        sys.stdout.write(made)
