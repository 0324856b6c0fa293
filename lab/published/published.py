"""Compares the model with published times of other projects' kernels on real Macs.

Prints the predicted time divided by the published time for every point of published.csv that can be modeled. Then
prints the median and the range of this ratio for each kind of measurement. The last two columns leave out one chip, or
one publication, at a time, and show the lowest and the highest median. A wide range means that the median depends on
one chip or one publication. This project has measured none of the points.

    python -m lab.published
"""

import csv
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab import model
from lab.published import published_kernels as kernels
from lab.published.published_kernels import Product
from torch_marlin_metal.profiling import AppleSiliconGPU

CALIBRATION = Path(__file__).with_name("published.csv")
Row = Mapping[str, str]
# From this number of rows on, MLX uses a matrix kernel. For fewer rows it uses a scalar kernel.
MLX_MATRIX_ROWS = 10
# From this GPU family on, MLX's matrix kernels use tensor units, whose instructions cannot be counted.
TENSOR_FAMILY = 10
# (N, K) of an output layer, if the publication names no size.
WIDE = (131072, 4096)


@dataclass(frozen=True)
class Point:
    """A published figure and the model's prediction: both in seconds, or for `bandwidth` both in bytes per second."""

    id: str
    kind: str
    chip: str
    what: str
    source: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Returns the predicted value divided by the published value."""
        return self.predicted / self.published


class NotModelled(Exception):
    """The model cannot predict what a row of the file measured. The message says why."""


def number(row: Row, column: str) -> float:
    value = float(row[column])
    if not 0 < value < float("inf"):
        raise ValueError(f"row {row['id']}: {column}: expected a positive number, got {row[column]!r}")
    return value


def count(row: Row, column: str) -> int:
    if not row[column].isdecimal() or int(row[column]) == 0:
        raise ValueError(f"row {row['id']}: {column}: expected a positive integer, got {row[column]!r}")
    return int(row[column])


def gpu_of(row: Row) -> AppleSiliconGPU:
    if row["chip"] not in AppleSiliconGPU.names():
        raise NotModelled(f"no chip {row['chip']!r}")
    cores = count(row, "gpu_cores") if row["gpu_cores"] else None
    try:
        return AppleSiliconGPU.from_name(row["chip"], cores)
    except ValueError as error:
        raise NotModelled(f"{row['chip']} with {row['gpu_cores']} cores") from error


def llama_model(row: Row) -> kernels.Model:
    found = kernels.MODELS.get(row["what"].split(",")[0])
    if found is None or row["format"] not in ("q4_0", "q8_0"):
        raise NotModelled(f"{row['what']} in {row['format']}")
    if not row["software"].startswith("llama.cpp"):
        raise NotModelled(f"kernels of {row['software']}")
    refuse_tensor_units(row)
    return found


def refuse_tensor_units(row: Row) -> None:
    """Raises NotModelled for a row about tensor units, whose kernels cannot be counted. MLX calls them NAX."""
    text = f"{row['software']} {row['what']} {row['note']}".lower()
    if "tensor unit" in text or "tensor api" in text or "nax" in text:
        raise NotModelled("kernels for tensor units")


def prompt(row: Row) -> Point:
    gpu, M = gpu_of(row), count(row, "M")
    predicted = kernels.whole_model(llama_model(row), M, row["format"], gpu, kernels.ggml_matrix)
    return point(row, "llama.cpp, prompts", M / number(row, "value"), predicted)


def token(row: Row) -> Point:
    gpu = gpu_of(row)
    predicted = kernels.whole_model(llama_model(row), 1, row["format"], gpu, kernels.ggml_vector)
    return point(row, "llama.cpp, tokens", 1 / number(row, "value"), predicted)


def few_tokens(row: Row) -> Point:
    gpu, M = gpu_of(row), count(row, "M")
    if M > kernels.GGML_MOST_VECTOR_ROWS:
        return prompt(row)
    kernel = kernels.ggml_few_rows if "ext" in row["software"] else kernels.ggml_vector
    if kernel is kernels.ggml_few_rows and M > 1 and row["format"] == "q8_0":
        raise NotModelled("mul_mv_ext in q8_0")
    predicted = kernels.whole_model(llama_model(row), M, row["format"], gpu, kernel)
    return point(row, "llama.cpp, 1 to 8 rows", M / number(row, "value"), predicted)


def mlx_product(row: Row) -> Product:
    if not row["software"].startswith("MLX"):
        raise NotModelled(f"kernels of {row['software']}")
    refuse_tensor_units(row)
    gpu, M = gpu_of(row), count(row, "M")
    if row["act"] == "bf16" and not gpu.has_bfloat:
        raise NotModelled("bf16 is emulated on M1 and M2, and was not counted")
    N, K = WIDE if row["N"] == "wide" else (count(row, "N"), count(row, "K"))
    name = f"{row['format']}/{row['group']}"
    if name not in kernels.WEIGHT_BYTES:
        raise NotModelled(name)
    product = Product(M, N, K, name, cached="cache" in row["note"] and "not" not in row["note"])
    if gpu.family >= TENSOR_FAMILY and kernels.mlx_takes_matrix(product, gpu):
        raise NotModelled("kernels for tensor units")
    return product


def mlx_kind(rows: int) -> str:
    return "MLX, matrix kernels" if rows >= MLX_MATRIX_ROWS else "MLX, scalar kernels"


def mlx_time(row: Row) -> Point:
    if row["what"].startswith("gather_qmm"):
        return experts(row)
    if row["what"] != "quantized_matmul":
        raise NotModelled(row["what"])
    product = mlx_product(row)
    return point(row, mlx_kind(product.M), 1e-3 * number(row, "value"), kernels.mlx(product, gpu_of(row)))


def experts(row: Row) -> Point:
    """Predicts a layer with eight experts for each token: three gathered products, one after the other."""
    tokens = row["what"].split(",")[1].split()[0]
    if not tokens.isdigit() or "chained" not in row["what"]:
        raise NotModelled(row["what"])
    experts_read = 8 * int(tokens)
    weight_format = f"{row['format']}/{row['group']}"
    if weight_format not in kernels.WEIGHT_BYTES:
        raise NotModelled(weight_format)
    product = Product(1, count(row, "N") * experts_read, count(row, "K"), weight_format)
    predicted = 3 * kernels.mlx_vector(product, gpu_of(row))
    return point(row, "MLX, scalar kernels", 1e-3 * number(row, "value"), predicted)


def bandwidth(row: Row) -> Point:
    gpu = gpu_of(row)
    published = 1e9 * number(row, "value")
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
    gpu, M, N, K = gpu_of(row), count(row, "M"), count(row, "N"), count(row, "K")
    if row["act"] not in ("fp16", "fp32"):
        raise NotModelled(f"dense {row['act']}")
    if gpu.family >= TENSOR_FAMILY:
        raise NotModelled("kernels for tensor units")
    problem = model.Problem(M, N, K, activations={"fp16": "float16", "fp32": "float32"}[row["act"]])
    (two_pass,) = model.candidates(problem, gpu, "two_pass")
    predicted = model.costs(problem, two_pass, gpu).dispatches[1].seconds
    return point(row, "torch, dense products", 2e-12 * M * N * K / number(row, "value"), predicted)


def point(row: Row, kind: str, published: float, predicted: float) -> Point:
    rows = f", {row['M']} rows" if row["M"] else ""
    what = f"{row['what']} {row['format']}{rows}"
    return Point(row["id"], kind, row["chip"], what, row["source"], published, predicted)


MAKERS: dict[str, Callable[[Row], Point]] = {
    "pp512": prompt,
    "tg128": token,
    "pp tokens": few_tokens,
    "time": mlx_time,
    "bandwidth": bandwidth,
    "rate": dense,
}


def compare(rows: Iterable[Row]) -> tuple[list[Point], dict[str, str]]:
    """Returns a point for each row that can be modeled, and id -> reason for each other row."""
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


def read() -> list[Row]:
    with CALIBRATION.open(newline="") as file:
        return list(csv.DictReader(file))


def by_kind(points: Iterable[Point]) -> dict[str, list[Point]]:
    kinds: dict[str, list[Point]] = {}
    for found in points:
        kinds.setdefault(found.kind, []).append(found)
    return kinds


def summary_of(points: Sequence[Point]) -> dict[str, Any]:
    """Summarizes points.

    Returns their number, the median and range of their ratios, and the range of the median if one chip or source is
    left out.
    """
    ratios = [found.ratio for found in points]
    return {
        "points": len(points),
        "median": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "without_a_chip": medians_without(points, lambda found: found.chip),
        "without_a_source": medians_without(points, lambda found: found.source),
    }


def medians_without(points: Iterable[Point], part_of: Callable[[Point], str]) -> list[float]:
    """Returns the least and the largest median over all ways to leave out one part, or [] if there is only one part."""
    found = [(part_of(point), point.ratio) for point in points]
    parts = {part for part, _ in found}
    if len(parts) == 1:
        return []
    medians = [statistics.median(ratio for other, ratio in found if other != part) for part in parts]
    return [min(medians), max(medians)]


def main() -> None:
    points, left = compare(read())
    console = Console(width=140)
    table = Table("id", "kind", "chip", "what", "published us", "predicted us", "predicted / published")
    for found in points:
        is_rate = found.published < 1e-9
        times = ("", "") if is_rate else (f"{found.published * 1e6:.1f}", f"{found.predicted * 1e6:.1f}")
        table.add_row(found.id, found.kind, found.chip, found.what, *times, f"{found.ratio:.2f}")
    console.print(table)
    table = Table("kind", "points", "median", "least", "most", "without a chip", "without a source")
    for kind, of_kind in by_kind(points).items():
        row = summary_of(of_kind)
        ranges = (
            " to ".join(f"{median:.2f}" for median in row[name]) for name in ("without_a_chip", "without_a_source")
        )
        table.add_row(kind, str(row["points"]), *(f"{row[name]:.2f}" for name in ("median", "least", "most")), *ranges)
    console.print(table)
    reasons = sorted(set(left.values()))
    console.print(f"{len(left)} rows are not modelled: {', '.join(reasons)}")
