"""`torch-marlin-metal bench`: times this package and its alternatives, or a language model, on this machine."""

import platform
import statistics
import subprocess
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from torch_marlin_metal.cli import arguments
from torch_marlin_metal.cli.models import timing
from torch_marlin_metal.cli.models.opened import Fuse, Opened
from torch_marlin_metal.cli.output import DONE, Json, progress_bar, show
from torch_marlin_metal.extension import cpu_capability
from torch_marlin_metal.gpu.device import AppleSiliconGPU
from torch_marlin_metal.gpu.tuning.chains import measure, median_ratio
from torch_marlin_metal.gpu.tuning.peers import OURS, rivals
from torch_marlin_metal.gpu.tuning.products import Product
from torch_marlin_metal.gpu.tuning.variants import moved_bytes, roof_seconds, variants
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.printing import table
from torch_marlin_metal.version import __version__

SHAPES = ("4096,4096", "14336,4096", "4096,14336")
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
ROUNDS = 9


def bench(
    model: Annotated[
        Path | None, typer.Argument(help="A model, as `generate` takes it; without it, products are timed.")
    ] = None,
    shape: arguments.Shapes = None,
    rows: arguments.Rows = None,
    weight_format: Annotated[
        str | None, typer.Option(help="uint4b8 ...; a model of floats is quantized only with this option.")
    ] = None,
    group_size: arguments.GroupSize = None,
    dtype: Annotated[str | None, typer.Option(help="Default: float16, or the model's own.")] = None,
    device: arguments.Device = None,
    variant: Annotated[str | None, typer.Option(help="all: every variant of this package, and the peak rates.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=3, help="Rounds in which each is timed once. Default: 9, or 5 for a model.")
    ] = None,
    cold_mb: arguments.ColdMb = None,
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="MODEL: a prompt's tokens. Default: 512.")
    ] = None,
    new_tokens: Annotated[list[int] | None, typer.Option(min=1, help="MODEL: tokens one by one. Default: 128.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="MODEL: sequences at once. Default: 1.")] = None,
    fuse: Fuse = True,
    as_json: Json = False,
) -> int:
    """Times packed products, or a model.

    The alternatives are torch's dense product, torch's int4 operator, and two_pass, which decodes the weight first.
    Each is timed once per round, on a chain of products whose weights are not in the caches. On mps, the GPU's clock
    gives the times, and another column has the host's times. The table shows medians over the rounds, of times and of
    ratios. --variant all adds every variant of this package, its memory rate and its share of the peak speed.

    `bench MODEL` times a language model as llama-bench does: a prompt of 512 tokens (pp512), and 128 tokens generated
    one by one (tg128), each from an empty cache. --prompt-tokens, --new-tokens and --batch may be repeated.
    """
    chosen = arguments.device_of(device)
    machine = describe_machine(chosen)
    products = {"shape": shape, "rows": rows, "group-size": group_size, "variant": variant, "cold-mb": cold_mb}
    models = {"prompt-tokens": prompt_tokens, "new-tokens": new_tokens, "batch": batch, "no-fuse": not fuse}
    if wrong := [f"--{name}" for name, given in (models if model is None else products).items() if given]:
        kind, owner = ("bench", "a model") if model is None else ("bench MODEL", "products")
        raise ValueError(f"{kind}: expected no {' and '.join(wrong)}, for {owner} only")
    if model is not None:
        loaded = Opened.of(model, chosen, dtype, weight_format, fuse)
        prompts, singles = ([], []) if prompt_tokens or new_tokens else ([timing.PROMPT], [timing.NEW])
        sizes = (prompt_tokens or prompts, new_tokens or singles, batch or [timing.BATCH])
        speeds = timing.measure_model(loaded, *sizes, rounds or timing.ROUNDS, as_json)
        shown = timing.model_table(in_words(machine), loaded.described(), speeds)
        show({"machine": machine, **loaded.described(), "results": speeds}, shown, as_json)
        return DONE
    rounds, dtype, weight_format = rounds or ROUNDS, dtype or "float16", weight_format or "uint4b8"
    variant, cold_bytes = variant or "auto", (cold_mb or 256) * 10**6
    if variant not in ("auto", "all") or (variant == "all" and chosen != "mps"):
        raise ValueError(f"--variant: expected auto, or all on mps, got {variant!r} on {chosen}")
    element = arguments.floating(dtype)
    timed = [arguments.product_of("bench", text, weight_format, group_size, dtype) for text in shape or SHAPES]
    results: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    numbers = sorted(set(rows or ROWS))
    with progress_bar(len(timed) * len(numbers), "product", as_json) as bar:
        for product in timed:
            weight = product.make_weight(chosen)
            for M in numbers:
                a = torch.randn(M, product.K, dtype=element, device=chosen)
                if variant == "all":
                    found = _variant_row(product, weight, a, rounds, cold_bytes)
                else:
                    found, absent = _row(weight, a, rounds, cold_bytes)
                    missing |= absent
                results.append({**vars(product), "M": M, **found})
                bar.update()
    value = {"machine": machine, "rounds": rounds, "results": results, "not_compared": missing}
    shown = _variant_table(machine, results) if variant == "all" else _table(machine, results, missing)
    show(value, shown, as_json)
    return DONE


def _row(weight: PackedWeight, a: torch.Tensor, rounds: int, cold_bytes: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the times of a product and of its alternatives, and the reason for each alternative that is missing."""
    chains, absent = rivals(weight, a, cold_bytes)
    measured = measure(chains, rounds)
    times = {name: [found.seconds for found in values] for name, values in measured.items()}
    host = {name: [found.host_seconds for found in values] for name, values in measured.items()}
    row = {
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "host_seconds": {name: statistics.median(values) for name, values in host.items()},
        "has_gaps": [name for name, values in measured.items() if any(found.has_gaps for found in values)],
        "times_faster": {name: median_ratio(times[name], times[OURS]) for name in times},
    }
    return row, absent


def _variant_row(
    product: Product, weight: PackedWeight, a: torch.Tensor, rounds: int, cold_bytes: int
) -> dict[str, Any]:
    gpu = AppleSiliconGPU.planned()
    chains = variants(product, weight, a, cold_bytes)
    moved = moved_bytes(weight, a)
    roof = roof_seconds(product, a.shape[0], moved, gpu.dram_bytes_per_second, gpu.matrix_flop_per_second)
    measured = measure(chains, rounds)
    found = {}
    for name, values in measured.items():
        seconds = statistics.median(value.seconds for value in values)
        found[name] = {"seconds": seconds, "bytes_per_second": moved / seconds, "of_roof": roof / seconds}
    has_gaps = [name for name, values in measured.items() if any(value.has_gaps for value in values)]
    return {"chosen": next(iter(chains)), "variants": found, "has_gaps": has_gaps}


def _begin(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['dtype']} x {row['weight_format']} g{row['group_size']} [{row['K']}, {row['N']}]", str(row["M"])


def _variant_table(machine: dict[str, str], results: list[dict[str, Any]]) -> Any:
    rows = [
        (
            *_begin(row),
            f"{name} (the planner's choice)" if name == row["chosen"] else name,
            f"{found['seconds'] * 1e6:.1f}",
            f"{found['bytes_per_second'] / 1e9:.1f}",
            f"{found['of_roof']:.0%}",
        )
        for row in results
        for name, found in row["variants"].items()
    ]
    return table(
        in_words(machine),
        *("product", "M", "variant", "us", "GB/s", "of roof"),
        rows=rows,
        right=("M", "us", "GB/s", "of roof"),
        caption="GB/s: bytes that a product must move, over the measured time; of roof: peak rates",
    )


def _table(machine: dict[str, str], results: list[dict[str, Any]], missing: dict[str, str]) -> Any:
    names = [name for name in results[0]["seconds"] if name != OURS]
    heading = ("product", "M", "us", "host us", "TFLOP/s", *(f"x {name}" for name in names))
    rows = []
    for row in results:
        seconds, host = row["seconds"][OURS], row["host_seconds"][OURS]
        flops = 2e-12 * row["M"] * row["N"] * row["K"] / seconds
        ratios = [f"{row['times_faster'][name]:.2f}" if name in row["times_faster"] else "" for name in names]
        rows.append((*_begin(row), f"{seconds * 1e6:.0f}", f"{host * 1e6:.0f}", f"{flops:.3f}", *ratios))
    lines = ["us: on the device; host us: until a call returns, beside the GPU's work"]
    if waiting := sorted({name for row in results for name in row["has_gaps"]}):
        lines += [f"in several command buffers, so their times may hold waits for the host: {', '.join(waiting)}"]
    lines += ["x NAME: time of NAME divided by ours; above 1, this package is faster"]
    lines += [f"{name} is not compared: {reason}" for name, reason in missing.items()]
    return table(in_words(machine), *heading, rows=rows, right=heading[1:], caption="\n".join(lines))


def in_words(machine: dict[str, str]) -> str:
    return ", ".join(f"{key} {text}" for key, text in machine.items())


def facts() -> dict[str, str]:
    """Returns the facts about this machine that every report contains."""
    return {
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "processor": processor_name(),
        "torch": torch.__version__,
        "torch_marlin_metal": __version__,
    }


def gpu_name() -> str:
    return f"{torch.backends.mps.get_name()}, {torch.backends.mps.get_core_count()} cores"


def describe_machine(device: str) -> dict[str, str]:
    """Returns the facts about this machine that are needed to compare its numbers with other machines'."""
    if device == "mps":
        return {"device": device, **facts(), "gpu": gpu_name()}
    return {"device": device, **facts(), "threads": str(torch.get_num_threads()), "isa": cpu_capability().isa}


def processor_name() -> str:
    """Returns the processor's name as the system reports it."""
    if platform.system() == "Darwin":  # platform.processor() only says "arm" there
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()
