"""Measures the peak memory of `from_pretrained` for packed mixtures with layers of Qwen3 30B and gpt-oss 20B.

    python benchmarks/load_mixture.py

The weights are random. Each load runs in a process of its own, after the imports. Peak memory is the largest growth of
the process during the load, from VmHWM of Linux, which also counts mapped pages of files. It should stay below the size
of the packed tensors, one expert and 300 MB; the program exits with 1 if a load needs more.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from load_model import status

EXTRA = 300e6  # bytes
VOCABULARY, LAYERS = 1024, 2
QWEN3 = {"hidden": 2048, "inner": 768, "experts": 128}
GPT_OSS = {"hidden": 2880, "inner": 2880, "experts": 32}


def words(K: int, N: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (K // 8, N), dtype=torch.int32)


def make_qwen3(directory: Path) -> None:
    """Writes a GPTQ checkpoint with a matrix for each part of each expert, and the same in this package's format."""
    from transformers import Qwen3MoeConfig

    from torch_marlin_metal import PackedWeight, convert

    hidden, inner, experts = QWEN3.values()
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, moe_intermediate_size=inner, num_hidden_layers=LAYERS,
        num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=experts, num_experts_per_tok=8,
        dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    attention = {"q_proj": (hidden, 2048), "k_proj": (hidden, 512), "v_proj": (hidden, 512), "o_proj": (2048, hidden)}
    parts = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}

    def weights() -> Iterator[PackedWeight]:
        for layer in range(LAYERS):
            names = {f"self_attn.{name}": size for name, size in attention.items()}
            names |= {f"mlp.experts.{e}.{name}": size for e in range(experts) for name, size in parts.items()}
            for name, (K, N) in names.items():
                scales = torch.rand(K // 128, N).half() / 100
                yield PackedWeight(words(K, N), scales, "uint4b8", 128, name=f"model.layers.{layer}.{name}")

    def others() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("model.embed_tokens", "lm_head"):
            yield f"{name}.weight", torch.randn(VOCABULARY, hidden).bfloat16()
        yield "model.norm.weight", torch.ones(hidden).bfloat16()
        for layer in range(LAYERS):
            start = f"model.layers.{layer}"
            yield f"{start}.mlp.gate.weight", torch.randn(experts, hidden).bfloat16()
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{start}.{name}.weight", torch.ones(hidden).bfloat16()
            for name in ("q_norm", "k_norm"):
                yield f"{start}.self_attn.{name}.weight", torch.ones(128).bfloat16()

    convert.export_checkpoint(weights(), directory / "gptq", "gptq", other_tensors=others(), config=config.to_dict())
    convert.write_checkpoint(convert.open_reader(directory / "gptq"), directory / "own")


def make_gpt_oss(directory: Path) -> None:
    """Writes an MXFP4 checkpoint with the tensors of OpenAI's: blocks and scales of all experts of a layer in one."""
    import json

    from safetensors.torch import save_file
    from transformers import GptOssConfig

    hidden, inner, experts = GPT_OSS.values()
    config = GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=LAYERS,
        num_local_experts=experts, num_experts_per_tok=4, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
        dtype="bfloat16", architectures=["GptOssForCausalLM"],
    ).to_dict()  # fmt: skip
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    tensors = {
        f"{name}.weight": torch.randn(VOCABULARY, hidden).bfloat16() for name in ("model.embed_tokens", "lm_head")
    }
    tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
    heads = {"q_proj": (1024, hidden), "k_proj": (256, hidden), "v_proj": (256, hidden), "o_proj": (hidden, 1024)}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}.{name}.weight"] = torch.ones(hidden).bfloat16()
        tensors[f"{start}.self_attn.sinks"] = torch.zeros(16).bfloat16()
        for name, size in heads.items():
            tensors[f"{start}.self_attn.{name}.weight"] = torch.randn(size).bfloat16() / 50
            tensors[f"{start}.self_attn.{name}.bias"] = torch.zeros(size[0]).bfloat16()
        tensors[f"{start}.mlp.router.weight"] = torch.randn(experts, hidden).bfloat16()
        tensors[f"{start}.mlp.router.bias"] = torch.zeros(experts).bfloat16()
        for name, N, K in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            own = f"{start}.mlp.experts.{name}"
            tensors[f"{own}_blocks"] = torch.randint(0, 256, (experts, N, K // 32, 16), dtype=torch.uint8)
            tensors[f"{own}_scales"] = torch.randint(118, 124, (experts, N, K // 32), dtype=torch.uint8)
            tensors[f"{own}_bias"] = torch.zeros(experts, N).bfloat16()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load(path: Path) -> None:
    """Loads the model and prints three numbers of bytes: the growth at its peak, the model's tensors, one expert."""
    from transformers import AutoModelForCausalLM, GptOssForCausalLM, Qwen3MoeForCausalLM  # noqa: F401  before VmRSS

    import torch_marlin_metal as tmm
    import torch_marlin_metal.integrations.transformers

    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = status("VmRSS")
    model = AutoModelForCausalLM.from_pretrained(path)
    peak = status("VmHWM") - before
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    experts = [module for module in model.modules() if isinstance(module, tmm.MarlinExperts)]
    assert len(experts) == LAYERS, f"expected {LAYERS} packed layers of experts, got {len(experts)}"
    stacks = sum(t.nbytes for t in experts[0].buffers())
    print(peak, sum(tensors.values()), stacks // experts[0].num_experts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load)
        return 0
    is_too_much = False
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_qwen3(directory)
        make_gpt_oss(directory / "mxfp4")
        names = {"gptq": "Qwen3 30B, gptq", "own": "Qwen3 30B, own format", "mxfp4": "gpt-oss 20B, mxfp4"}
        for name, title in names.items():
            command = [sys.executable, __file__, "--load", str(directory / name)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            peak, packed, expert = (int(word) for word in output.split()[-3:])
            limit = packed + expert + EXTRA
            is_too_much |= peak > limit
            print(
                f"{title}, {LAYERS} layers: {packed / 1e6:.0f} MB of tensors, one expert {expert / 1e6:.1f} MB; peak "
                f"{peak / 1e6:.0f} MB, of at most {limit / 1e6:.0f} MB"
            )
    return int(is_too_much)


if __name__ == "__main__":
    sys.exit(main())
