"""Counts what the host encodes and compiles for the first and the hundredth token of a small Llama.

On a Mac, commits, encoders and dispatches may differ, because the software device has its own versions of PyTorch's
operators, and several of these run on the CPU. The compiled kernels are the same as on a Mac with an M1. "By file"
counts all kernels of each used file, as if the host compiled whole files instead of single functions.
"""

import argparse
import re
from dataclasses import dataclass

import softmetal

softmetal.install()  # before anything asks torch about mps
import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import torch_marlin_metal as tmm  # noqa: E402
from lab.software.compile_cost import ROOT, cost  # noqa: E402

FILE = re.compile(r'^#line 1 "kernels/([\w/]+\.metal)"', re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """The counts of one token."""

    commits: int
    encoders: int
    libraries: int
    kernels: int
    pipelines: int
    text: int  # bytes


def model_of(weight_format: str, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=256, **sizes)
    model = LlamaForCausalLM(config).to(dtype).eval()
    tmm.quantize_model(model, weight_format, progress=False)
    return model.to("mps")


def files_of(compiled: list[softmetal.Compile]) -> set[str]:
    """Returns the files of the compiled libraries, for example `gemm/gemv.metal`."""
    return {FILE.search(c.text)[1] for c in compiled if c.kind == "library"}  # type: ignore[index]


def count(compiled: list[softmetal.Compile], before: softmetal.StreamCounts) -> Step:
    now = softmetal.stream_counts()
    libraries = [c.text for c in compiled if c.kind == "library"]
    kernels = sum(
        1 if "#define MARLIN_ONLY " in text else len(re.findall(r"^\[\[kernel", text, re.M)) for text in libraries
    )
    return Step(
        now.commits - before.commits,
        now.encoders - before.encoders,
        len(libraries),
        kernels,
        len(compiled) - len(libraries),
        sum(map(len, libraries)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weight-format", default="uint4b8")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--prompt", type=int, default=12, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    model = model_of(options.weight_format, getattr(torch, options.dtype))
    ids = torch.arange(options.prompt)[None].to("mps")
    steps: dict[int, Step] = {}
    cache, used = None, set()
    with torch.inference_mode():
        for token in range(1, options.tokens + 1):
            torch.mps.synchronize()
            before = softmetal.stream_counts()
            with softmetal.compiles() as compiled:
                out = model(ids, past_key_values=cache, use_cache=True)
                ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
                int(ids)  # a program prints the token
            steps[token] = count(compiled, before)
            used |= files_of(compiled) if token == 1 else set()
    print(f"| {options.weight_format}, {options.dtype}: token | " + " | ".join(vars(steps[1])) + " |")
    print("|---" * (len(vars(steps[1])) + 1) + "|")
    for token in (1, 2, options.tokens):
        print(f"| {token} | " + " | ".join(map(str, vars(steps[token]).values())) + " |")
    whole = [cost(ROOT / "kernels" / name) for name in sorted(used)]
    kernels, text = sum(c.instantiations for c in whole), sum(c.source_bytes for c in whole)
    print(f"| 1, by file | | | {len(whole)} | {kernels} | | {text} |")


if __name__ == "__main__":
    main()
