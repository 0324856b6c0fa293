"""Compares the planner's model with published times of other projects' kernels on real Macs.

Takes a CSV file with the columns of published.csv. For every point that can be modelled, it prints predicted over
published time, then the median and range for each kind of measurement. This project has measured none of the points.
--plot draws all points, --json prints them for programs.

    python benchmarks/metal/published.py benchmarks/metal/published.csv --plot published.png
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import published_kernels as kernels
import torch
from published_kernels import Product
from rich.console import Console
from rich.table import Table

import torch_marlin_metal as tmm
from torch_marlin_metal.profiling import AppleSiliconGPU

CALIBRATION = Path(__file__).with_name("published.csv")
Row = Mapping[str, str]
# From this number of rows on, MLX uses a matrix kernel, and a scalar kernel for fewer.
MLX_MATRIX_ROWS = 10
# The size of an output layer, if the publication names none.
WIDE = (131072, 4096)


@dataclass(frozen=True)
class Point:
    """A published figure and the model's prediction: both in seconds, or for `bandwidth` both in bytes per second."""

    id: str
    kind: str
    chip: str
    what: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Returns predicted over published time."""
        return self.predicted / self.published


class NotModelled(Exception):
    """A row of the file measured something that the model cannot predict. The message is the reason."""


def gpu_of(row: Row) -> AppleSiliconGPU:
    if row["chip"] not in AppleSiliconGPU.names():
        raise NotModelled(f"no chip {row['chip']!r}")
    return AppleSiliconGPU.from_name(row["chip"], int(row["gpu_cores"]) if row["gpu_cores"] else None)


def llama_model(row: Row) -> kernels.Model:
    model = kernels.MODELS.get(row["what"].split(",")[0])
    if model is None or row["format"] not in ("q4_0", "q8_0"):
        raise NotModelled(f"{row['what']} in {row['format']}")
    return model


def prompt(row: Row) -> Point:
    gpu, M = gpu_of(row), int(row["M"])
    predicted = kernels.whole_model(llama_model(row), M, row["format"], gpu, kernels.ggml_matrix)
    return point(row, "llama.cpp, prompts", M / float(row["value"]), predicted)


def token(row: Row) -> Point:
    gpu = gpu_of(row)
    predicted = kernels.whole_model(llama_model(row), 1, row["format"], gpu, kernels.ggml_vector)
    return point(row, "llama.cpp, tokens", 1 / float(row["value"]), predicted)


def few_tokens(row: Row) -> Point:
    gpu, M = gpu_of(row), int(row["M"])
    kernel = kernels.ggml_few_rows if "ext" in row["software"] else kernels.ggml_vector
    predicted = kernels.whole_model(llama_model(row), M, row["format"], gpu, kernel)
    return point(row, "llama.cpp, 1 to 8 rows", M / float(row["value"]), predicted)


def mlx_product(row: Row) -> Product:
    if not row["software"].startswith("MLX"):
        raise NotModelled(f"kernels of {row['software']}")
    if row["act"] == "bf16" and gpu_of(row).family < 9:
        raise NotModelled("bf16 is emulated on M1 and M2, and was not counted")
    N, K = (int(row["N"]), int(row["K"])) if row["N"].isdigit() else WIDE
    name = f"{row['format']}/{row['group']}"
    if name not in kernels.WEIGHT_BYTES:
        raise NotModelled(name)
    return Product(int(row["M"]), N, K, name, cached="cache" in row["note"] and "not" not in row["note"])


def mlx_kind(rows: int) -> str:
    return "MLX, matrix kernels" if rows >= MLX_MATRIX_ROWS else "MLX, scalar kernels"


def mlx_time(row: Row) -> Point:
    if row["what"].startswith("gather_qmm"):
        return experts(row)
    if row["what"] != "quantized_matmul":
        raise NotModelled(row["what"])
    product = mlx_product(row)
    return point(row, mlx_kind(product.M), 1e-3 * float(row["value"]), kernels.mlx(product, gpu_of(row)))


def experts(row: Row) -> Point:
    """Models a layer with eight experts for each token: three gathered products, one after the other."""
    tokens = row["what"].split(",")[1].split()[0]
    if not tokens.isdigit() or "chained" not in row["what"]:
        raise NotModelled(row["what"])
    experts_read = 8 * int(tokens)
    product = Product(1, int(row["N"]) * experts_read, int(row["K"]), f"{row['format']}/{row['group']}")
    predicted = 3 * kernels.mlx_vector(product, gpu_of(row))
    return point(row, "MLX, scalar kernels", 1e-3 * float(row["value"]), predicted)


def bandwidth(row: Row) -> Point:
    gpu = gpu_of(row)
    published = 1e9 * float(row["value"])
    if row["what"] == "stream":
        return point(row, "memory rate", 1 / published, 1 / gpu.reachable_dram_bytes_per_second)
    if row["what"].startswith("quantized_matmul"):
        product = mlx_product(row)
        size = product.weight_bytes
        return point(row, mlx_kind(product.M), size / published, kernels.mlx(product, gpu))
    raise NotModelled(row["what"])


def dense(row: Row) -> Point:
    if row["what"] != "matmul" or not row["software"].startswith("torch") or not row["M"]:
        raise NotModelled(f"{row['what']} of {row['software']}")
    gpu, M, N, K = gpu_of(row), int(row["M"]), int(row["N"]), int(row["K"])
    if row["act"] == "bf16":
        raise NotModelled("dense bf16")
    name = {"fp16": "float16", "fp32": "float32"}[row["act"]]
    plan = tmm.plan(M, N, K, gpu=gpu, variant="two_pass", dtype=getattr(torch, name)).chosen
    return point(row, "torch, dense products", 2e-12 * M * N * K / float(row["value"]), plan.dispatches[1].seconds)


def point(row: Row, kind: str, published: float, predicted: float) -> Point:
    rows = f", {row['M']} rows" if row["M"] else ""
    return Point(row["id"], kind, row["chip"], f"{row['what']} {row['format']}{rows}", published, predicted)


MAKERS: dict[str, Callable[[Row], Point]] = {
    "pp512": prompt,
    "tg128": token,
    "pp tokens": few_tokens,
    "time": mlx_time,
    "bandwidth": bandwidth,
    "rate": dense,
}


def compare(rows: Iterable[Row]) -> tuple[list[Point], dict[str, str]]:
    """Returns a point for each row that can be modelled, and the reason, by id, for each row that cannot."""
    points, left = [], {}
    for row in rows:
        make = MAKERS.get(row["quantity"])
        try:
            if make is None:
                raise NotModelled(row["quantity"])
            points.append(make(row))
        except NotModelled as reason:
            left[row["id"]] = str(reason)
    return points, left


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by_kind(points: Iterable[Point]) -> dict[str, list[Point]]:
    kinds: dict[str, list[Point]] = {}
    for found in points:
        kinds.setdefault(found.kind, []).append(found)
    return kinds


def draw(points: Iterable[Point], path: Path) -> None:
    """Draws the ratio of the predicted to the published figure for each point, in a row for each kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    kinds = by_kind(points)
    families = {7: "M1", 8: "M2", 9: "M3, M4", 10: "M5"}
    for number, name in families.items():
        shown = [
            (point.ratio, height + 0.12 * (number - 8.5))
            for height, of_kind in enumerate(kinds.values())
            for point in of_kind
            if AppleSiliconGPU.from_name(point.chip).family == number
        ]
        if shown:
            axes.scatter(*zip(*shown, strict=True), s=14, label=name)
    axes.axvspan(0.9, 1.1, alpha=0.15)
    axes.set_yticks(range(len(kinds)), list(kinds))
    axes.set_xlabel("predicted time / published time")
    axes.legend()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", default=CALIBRATION, help="published figures (default: ours)")
    parser.add_argument("--plot", type=Path, help="draw all points into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    points, left = compare(read(arguments.csv))
    if not points:
        print(f"published.py: {arguments.csv}: no row that the model describes", file=sys.stderr)
        return 1
    if arguments.plot:
        draw(points, arguments.plot)
    kinds = by_kind(points)
    summary = {
        kind: {
            "points": len(found),
            "median": statistics.median(p.ratio for p in found),
            "least": min(p.ratio for p in found),
            "most": max(p.ratio for p in found),
        }
        for kind, found in kinds.items()
    }
    if arguments.json:
        shown = [{**asdict(p), "ratio": p.ratio} for p in points]
        print(json.dumps({"points": shown, "kinds": summary, "not_modelled": left}, indent=1))
        return 0
    console = Console(width=140)
    table = Table("id", "kind", "chip", "what", "published us", "predicted us", "predicted / published")
    for found in points:
        is_rate = found.published < 1e-9
        times = ("", "") if is_rate else (f"{found.published * 1e6:.1f}", f"{found.predicted * 1e6:.1f}")
        table.add_row(found.id, found.kind, found.chip, found.what, *times, f"{found.ratio:.2f}")
    console.print(table)
    table = Table("kind", "points", "median", "least", "most")
    for kind, row in summary.items():
        table.add_row(kind, str(row["points"]), *(f"{row[name]:.2f}" for name in ("median", "least", "most")))
    console.print(table)
    reasons = sorted(set(left.values()))
    console.print(f"{len(left)} rows are not modelled: {', '.join(reasons)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
