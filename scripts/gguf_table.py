"""Writes the names that tensors of GGUF files have in transformers: the file `gguf_table.py` of the package.

The names come from the table of the package gguf and from the state dicts of transformers' model classes. `SILENT` has
the few names that gguf's table lacks, and `MODEL_TYPES` the architectures with other names in the two packages.

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
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FILE = Path(__file__).parents[1] / "torch_marlin_metal" / "checkpoints" / "formats" / "gguf_table.py"
BLOCKS = 64
# Architectures that are read. Their files must be tested: tests/checkpoints/test_gguf_models.py has all of them.
READ = (
    *("llama", "llama4", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gpt-oss"),
    *("gemma", "gemma2", "gemma3", "gemma4", "phi2", "phi3", "starcoder2", "stablelm", "olmo2", "olmoe"),
    *("command-r", "granite", "smollm3", "nemotron", "cohere2", "granitemoe", "arcee", "olmo", "seed_oss", "ernie4_5"),
    *("exaone4", "glm4", "glm4moe", "lfm2", "dots1", "minimax-m2", "hunyuan-dense"),
)
MODEL_TYPES = {"phi2": "phi", "command-r": "cohere", "hunyuan-dense": "hunyuan_v1_dense"}
# Settings for classes whose default config has not all kinds of layers, or cannot be built.
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
    "nemotron": {"num_attention_heads": 48, "num_key_value_heads": 8},
}
# Names of gguf for endings of transformers' names, where gguf's table has none.
SILENT = {
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
STACKED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)(_bias)?")


def plain(name: str) -> str:
    """Returns a name without case, signs and the ending of text models, to compare names of the two packages."""
    return re.sub("[^a-z0-9]", "", name.lower())


def model_type(architecture: str) -> str:
    """Returns transformers' model type of an architecture."""
    own = {plain(kind): kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    name = plain(architecture)
    return MODEL_TYPES.get(architecture) or own.get(f"{name}text") or own[name]


def pairs(architecture: str) -> dict[str, str]:
    """Returns transformers' names of the tensors of an architecture by gguf's names, both as in the file."""
    config = AutoConfig.for_model(model_type(architecture), **SETTINGS.get(architecture, {}))
    config.num_hidden_layers = min(config.num_hidden_layers, 12)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, BLOCKS)
    found: dict[str, str] = {}
    for tensor in model.state_dict():
        stacked = STACKED.fullmatch(tensor)
        if stacked and stacked[1] == "gate_up_proj":
            continue  # its parts have the names of down
        ending = re.search(r"\.(weight|bias)$", tensor)
        module = tensor.removesuffix(ending[0]) if ending else tensor.removesuffix("_bias")
        silent = next((name for end, name in SILENT.items() if tensor.endswith(f".{end}")), None)
        block = re.search(r"\.(\d+)\.", tensor)
        if silent is not None:
            assert block is not None
            found[f"blk.{{}}.{silent}"] = tensor.replace(block[0], ".{}.", 1)
            continue
        name = names.get_name(module) or ("output" if module == "lm_head" else None)
        if name is None:
            raise SystemExit(f"{architecture}: gguf has no name for {tensor}; add one to SILENT")
        name, module = re.sub(r"blk\.\d+\.", "blk.{}.", name), re.sub(r"\.\d+\.", ".{}.", module, count=1)
        if not ending and not stacked:
            name += ".weight" * (not name.endswith("ssm_a"))
        found[name] = module
    return {_short(name, "blk.{}."): _short(module, "model.layers.{}.") for name, module in found.items()}


def _short(name: str, block: str) -> str:
    return f".{name.removeprefix(block)}" if name.startswith(block) else name


def table() -> tuple[dict[str, str], dict[str, tuple[str, dict[str, str]]]]:
    """Returns the names that most architectures have, and those of each architecture that differ from them."""
    own = {architecture: pairs(architecture) for architecture in READ}
    counts: dict[str, Counter[str]] = {}
    for found in own.values():
        for name, module in found.items():
            counts.setdefault(name, Counter())[module] += 1
    common = {name: most for name, each in sorted(counts.items()) for most, count in each.most_common(1) if count > 1}
    differing = {
        architecture: (
            model_type(architecture),
            {name: module for name, module in sorted(found.items()) if common.get(name) != module},
        )
        for architecture, found in own.items()
    }
    return common, differing


def text() -> str:
    """Returns the text of the file."""
    common, differing = table()
    made = (
        f"scripts/gguf_table.py makes this file from gguf {version('gguf')} and transformers {version('transformers')}."
    )
    rules = (
        'A name that begins with a dot belongs to a block: ".attn_k" is "blk.0.attn_k", and ".mlp" is '
        '"model.layers.0.mlp"; "{}" is the number of the block in other names. Names without .weight or .bias stand '
        "for both."
    )
    lines = [
        '"""Names of transformers for the tensors of GGUF files.',
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
