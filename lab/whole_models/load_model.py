"""Measures `from_pretrained` of a random 4-bit Llama of 1.1 billion parameters: time relative to `cp`, and peak memory.

    python -m lab.whole_models.load_model

Each load runs in its own process. The clock starts after the imports. Loads alternate with a `cp` of the same directory
to the same disk. The files are in the page cache. Peak memory is the largest growth of the process during the load
(VmHWM of Linux), which also counts mapped pages of files. Figures are medians.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY, GROUP = 2048, 8192, 16, 32000, 128
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}  # fmt: skip


def make(directory: Path) -> None:
    """Writes the model as a GPTQ checkpoint and in this package's own format."""
    from transformers import LlamaConfig

    from torch_marlin_metal import PackedWeight, convert

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
        num_attention_heads=16, tie_word_embeddings=True, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip

    def weights() -> Iterator[PackedWeight]:
        for layer in range(LAYERS):
            for name, (K, N) in PROJECTIONS.items():
                words = torch.randint(-(2**31), 2**31 - 1, (K // 8, N), dtype=torch.int32)
                scales = torch.rand(K // GROUP, N).half() / 100
                yield PackedWeight(words, scales, "uint4b8", GROUP, name=f"model.layers.{layer}.{name}")

    def others() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.embed_tokens.weight", torch.randn(VOCABULARY, HIDDEN).bfloat16()
        yield "model.norm.weight", torch.ones(HIDDEN).bfloat16()
        for layer in range(LAYERS):
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{layer}.{name}.weight", torch.ones(HIDDEN).bfloat16()

    convert.export_checkpoint(weights(), directory / "gptq", "gptq", other_tensors=others(), config=config.to_dict())
    convert.write_checkpoint(convert.open_reader(directory / "gptq"), directory / "own")


def status(field: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def load(path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401  imported before the clock starts

    import torch_marlin_metal.integrations.transformers  # noqa: F401

    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = status("VmRSS"), time.perf_counter()
    AutoModelForCausalLM.from_pretrained(path)
    print(time.perf_counter() - start, status("VmHWM") - before)


def copied(path: Path, target: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", path, target], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load)
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make(directory)
        for name in ("gptq", "own"):
            path = directory / name
            size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            loads, copies = [], []
            for _ in range(arguments.rounds):
                copies.append(copied(path, directory / "copy"))
                command = [sys.executable, __file__, "--load", str(path)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                loads.append([float(word) for word in output.split()[-2:]])
            seconds = statistics.median(one[0] for one in loads)
            ratio = statistics.median(one[0] / copy for one, copy in zip(loads, copies, strict=True))
            peak = statistics.median(one[1] for one in loads)
            print(
                f"{name}: {size / 1e6:.0f} MB of files; {seconds:.2f} s, {ratio:.2f} times cp "
                f"({statistics.median(copies):.2f} s); peak memory {peak / 1e6:.0f} MB, {peak / size:.2f} of the files"
            )


if __name__ == "__main__":
    main()
