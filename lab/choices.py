"""Compares the planner's choices with the model's best choices, for random products and products with experts.

python -m lab.choices --plans 10000    takes about 3 minutes
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.decisions import EXPERTS_FORMS, KERNELS, counted_formats
from lab.model import ExpertsProblem, families, predict
from lab.model.geometry import BLOCK, SIMD_WIDTH
from lab.model.problems import Problem, Tiling
from torch_marlin_metal.extension import native
from torch_marlin_metal.profiling import AppleSiliconGPU

# A choice of the planner should take at most this many times as long as the model's best choice.
MOST_RATIO = 1.10


@dataclass(frozen=True)
class Choice:
    """The planner's choice for a product, compared with the model's best choice.

    Attributes:
        chosen: the planner's tiling.
        best: the tiling with the shortest predicted time.
        ratio: the predicted time of `chosen`, divided by the predicted time of `best`.
    """

    gpu: AppleSiliconGPU
    problem: Problem | ExpertsProblem
    chosen: Tiling
    best: Tiling
    ratio: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} {self.gpu.name} ({self.gpu.cores}) {self.problem}: {self.chosen}, not {self.best}"


# N and K of the products of real models.
SHAPES = (
    *((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (11008, 4096), (28672, 8192), (8192, 28672)),
    *((8192, 8192), (5120, 5120), (13824, 5120), (5120, 13824), (3584, 3584), (18944, 3584), (3584, 18944)),
    *((512, 3584), (2048, 2048), (8192, 2048), (2048, 8192), (512, 2048), (896, 896), (4864, 896), (896, 4864)),
    *((128, 896), (1536, 1536), (8960, 1536), (1536, 8960), (3072, 3072), (8192, 3072), (3072, 8192)),
    *((5120, 2880), (2880, 4096), (152064, 3584), (128256, 4096), (32000, 4096), (151936, 896), (201088, 2880)),
    *((27648, 5120), (5120, 27648), (1152, 1152), (6912, 1152), (1152, 6912), (2304, 9216), (768, 3072)),
)
# Number of experts, experts of a token, N and K of the two products of real mixtures.
MIXTURES = (
    *((8, 2, 14336, 4096), (8, 2, 4096, 14336), (32, 4, 5760, 2880), (32, 4, 2880, 2880), (128, 4, 5760, 2880)),
    *((128, 8, 768, 2048), (128, 8, 2048, 768), (128, 8, 1536, 4096), (128, 8, 4096, 1536), (64, 6, 1408, 2048)),
    *((64, 6, 2048, 1408), (256, 8, 2048, 7168), (256, 8, 7168, 2048), (64, 8, 1024, 2048), (64, 8, 2048, 1024)),
    *((60, 4, 1408, 2048), (16, 1, 8192, 5120), (16, 1, 5120, 8192), (512, 10, 512, 2048), (512, 10, 2048, 512)),
)


Problems = Callable[[random.Random], Iterator[tuple[AppleSiliconGPU, Problem | ExpertsProblem]]]


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return int(math.exp(rng.uniform(math.log(least), math.log(most + 1))))


def _gpu(rng: random.Random) -> AppleSiliconGPU:
    name, _, most, fewest, _ = rng.choice(native.chips())
    return AppleSiliconGPU.from_name(name, rng.choice((most, most, fewest, rng.randint(fewest, most))))


def _weight(rng: random.Random, K: int) -> dict[str, Any]:
    row = rng.choice(counted_formats())
    group = row.fixed_group_size or rng.choice((16, 32, 64, 128, 256, K))
    return {
        "weight_format": row.name,
        "group_size": group,
        "activations": rng.choice(("float16", "bfloat16", "float32")),
    }


def random_products(rng: random.Random) -> Iterator[tuple[AppleSiliconGPU, Problem]]:
    """Yields random products without end. Half have the sizes of real models, and most have few rows."""
    while True:
        N, K = rng.choice(SHAPES)
        if rng.random() < 0.5:
            N, K = (_log_uniform(rng, 256, 32768) // 32 * 32 for _ in range(2))
        M = rng.choice((rng.randint(1, 16), rng.randint(1, 16), rng.randint(1, 64), _log_uniform(rng, 1, 4096)))
        yield _gpu(rng), Problem(M, N, K, **_weight(rng, K))


def random_mixtures(rng: random.Random) -> Iterator[tuple[AppleSiliconGPU, ExpertsProblem]]:
    """Yields random products with experts without end."""
    while True:
        experts, top_k, N, K = rng.choice(MIXTURES)
        tokens = rng.choice((1, rng.randint(1, 16), _log_uniform(rng, 1, 4096)))
        reduce = rng.random() < 0.5
        weight = _weight(rng, K)
        yield (
            _gpu(rng),
            ExpertsProblem.of_tokens(tokens, top_k, experts, N, K, reduce=reduce, rows_by_slot=reduce, **weight),
        )


def planned(name: str, M: int, dispatches: list[dict[str, Any]]) -> Tiling:
    """Returns the tiling of a plan, from the plan's name (for example "fused:32x64x64") and its dispatches."""
    variant, _, text = name.partition(":")
    if variant == "two_pass":
        return Tiling(variant, "dequantize", (0, 0, 0))
    tile = tuple(map(int, text.split("x")))
    # the gated kernel takes as long as moe_gemv
    named = [{**dispatch, "kernel": dispatch["kernel"].replace("_gated", "")} for dispatch in dispatches]
    known = {
        KERNELS.get(variant, f"gemm_{variant}"),
        f"moe_{variant}",
        *(form for form, _ in EXPERTS_FORMS.get(variant, ())),
    }
    products = [dispatch for dispatch in named if dispatch["kernel"] in known]
    first = products[0]
    slices = re.search(r"k_per_slice=(\d+)", first["text"])
    assert slices is not None
    rest = -(-(M % tile[0]) // BLOCK) * BLOCK if len(products) > 1 else 0
    simdgroups = first["threads"][0] // SIMD_WIDTH
    return Tiling(variant, first["kernel"], tile, 0, simdgroups, int(slices[1]), first["grid"][2], rest)  # type: ignore[arg-type]


def chosen(gpu: AppleSiliconGPU, problem: Problem | ExpertsProblem, variant: str = "auto") -> Tiling:
    """Returns the planner's choice for a product among the tilings of `variant`."""
    product = problem.product if isinstance(problem, ExpertsProblem) else problem
    weight = {
        "chip": gpu.name, "cores": gpu.cores, "N": product.N, "K": product.K, "weight_format": product.weight_format,
        "group_size": product.group_size, "activations": product.activations, "variant": variant,
    }  # fmt: skip
    if isinstance(problem, ExpertsProblem):
        name, dispatches, _ = native.moe_plan(
            **weight, tokens=problem.tokens, top_k=problem.top_k, experts=problem.experts,
            rows_by_slot=problem.rows_by_slot, reduce=problem.reduce,
        )  # fmt: skip
    else:
        rows_of_plans, index, _ = native.gemm_plans(
            **weight, half_subnormals=True, M=problem.M, scales=problem.scales_type, zeros=problem.zeros_type,
            has_perm=False, has_global_scale=False, has_bias=False, tuned=False, own_system=False,
        )  # fmt: skip
        name, _, _, _, dispatches = rows_of_plans[index]
    return planned(name, product.M, dispatches)


def choice(gpu: AppleSiliconGPU, problem: Problem | ExpertsProblem) -> Choice:
    """Compares the planner's choice for a product with the model's best of all tilings and splits."""
    tiling = chosen(gpu, problem)
    seconds = float(predict(problem, tiling, gpu))
    best, least = tiling, seconds
    for family in families(problem, gpu, "auto"):
        times = np.atleast_1d(predict(problem, family, gpu))
        if times.min() < least:
            best, least = family.at(int(times.argmin())), float(times.min())
    return Choice(gpu, problem, tiling, best, seconds / least)


def spread(choices: list[Choice]) -> str:
    """Returns the median, 99th percentile and maximum of the ratios, and how many ratios exceed 1.10."""
    ratios = np.array([found.ratio for found in choices])
    above = int((ratios > MOST_RATIO).sum())
    return (
        f"{len(ratios)} plans: median {np.median(ratios):.3f}, 99 % under {np.percentile(ratios, 99):.3f}, "
        f"most {ratios.max():.3f}, {above} above {MOST_RATIO}"
    )


def score(count: int) -> None:
    """Compares the planner's choices with the model's best, for products and for products with experts."""
    sources: dict[str, Iterator[tuple[AppleSiliconGPU, Problem | ExpertsProblem]]] = {
        "products": random_products(random.Random(1)),
        "experts": random_mixtures(random.Random(2)),
    }
    for what, problems in sources.items():
        choices = [choice(*next(problems)) for _ in range(count)]
        print(f"{what}: {spread(choices)}")
        for trait in ("activations", "weight_format"):
            groups: dict[str, list[Choice]] = {}
            for found in choices:
                problem = found.problem.product if isinstance(found.problem, ExpertsProblem) else found.problem
                groups.setdefault(getattr(problem, trait), []).append(found)
            for name, group in sorted(groups.items()):
                print(f"  {name}: {spread(group)}")
        for found in sorted(choices, key=lambda found: -found.ratio):
            if found.ratio > MOST_RATIO:
                print(f"  {found}")


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.choices", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=10000, help="number of products of each kind")
    score(parser.parse_args().plans)
    return 0


if __name__ == "__main__":
    sys.exit(main())
