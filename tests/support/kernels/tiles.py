"""Launches the staged kernels, and checks their numbers of steps and barriers."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support import reference
from tests.support.kernels.launch import ELEMENT_NAMES, Counters, facts
from tests.support.kernels.problems import Problem, Shares, check_reads, run_product, sliced

_KERNEL = re.compile(r"gemm_(double_buffered|single_stage|striped)_(\d+)x(\d+)x(\d+)")
STAGED = [name for name in facts()["kernels"] if _KERNEL.match(name) and "striped" not in name]
STRIPED = [name for name in facts()["kernels"] if _KERNEL.match(name) and "striped" in name]


@dataclass(frozen=True)
class Tile:
    """A tile shape from a kernel's name, with the host's figures for this shape."""

    kernel: str
    M: int
    N: int
    K: int
    stages: int
    threads: int
    bytes: dict[str, list[int]]  # of threadgroup memory, by element type and number of stages

    @classmethod
    def of(cls, kernel: str) -> "Tile":
        found = _KERNEL.fullmatch(kernel)
        assert found, kernel
        shape = [int(size) for size in found.groups()[1:]]
        threads, sizes = next(row[3:] for row in facts()["tiles"] if row[:3] == shape)
        return cls(kernel, *shape, 1 if found[1] == "single_stage" else 2, threads, sizes)

    def steps(self, k: int) -> int:
        return -(-k // self.K)

    def options(self, problem: Problem, groups: tuple[int, int, int]) -> dict[str, Any]:
        memory = self.bytes[ELEMENT_NAMES[problem.dtype]][self.stages]
        return {"group": (self.threads, 1, 1), "groups": groups, "threadgroup_bytes": memory}

    def check_work(self, spans: list[list[int]], counters: Counters) -> None:
        """Checks that the kernel runs no extra step. A step has one barrier, or two with a single stage.

        Args:
            spans: for each threadgroup and each of its tiles, the number of k that the threadgroup computes.
        """
        steps = sum(self.steps(k) for group in spans for k in group)
        assert counters.mmas == steps * self.M * self.N * self.K // 512, "8x8x8 products"
        between_tiles = sum(len(group) - 1 for group in spans if group)
        barriers = steps * (1 if self.stages == 2 else 2) + between_tiles
        assert counters.threadgroup_barriers == barriers, "threadgroup barriers"


def run_staged(kernel: str, problem: Problem, *, slices: int = 1, counted: bool = True, **options: Any) -> torch.Tensor:
    tile = Tile.of(kernel)
    k_per_slice = -(-tile.steps(problem.K) // slices) * tile.K
    slices = -(-problem.K // k_per_slice)
    tiles = (-(-problem.N // tile.N), -(-problem.M // tile.M))
    options = tile.options(problem, (*tiles, slices)) | options
    result, counters = run_product(kernel, problem, k_per_slice, {}, options, sliced(problem, slices))
    if counted:
        spans = [[min(k_per_slice, problem.K - k)] for k in range(0, problem.K, k_per_slice)]
        tile.check_work(spans * (tiles[0] * tiles[1]), counters)
        columns, rows = tiles
        words = rows * reference.word_bytes(problem.weight_format, problem.K, problem.N)
        high = words if problem.weight_format in reference.PLANES else 0
        check_reads(counters, words, high, columns * problem.M * problem.K * problem.dtype.itemsize)
    return result


def run_striped(
    kernel: str, problem: Problem, *, k_per_slice: int, stripes: int, counted: bool = True, **options: Any
) -> torch.Tensor:
    tile = Tile.of(kernel)
    slices = max(problem.K // k_per_slice, 1)
    tiles = -(-problem.M // tile.M) * -(-problem.N // tile.N)
    lengths = [k_per_slice] * (slices - 1) + [problem.K - k_per_slice * (slices - 1)]
    spans = []
    for stripe in np.array_split(range(tiles * slices), stripes):  # the first stripes may have one unit more
        taken: dict[int, int] = {}
        for unit in stripe:
            taken[unit // slices] = taken.get(unit // slices, 0) + lengths[unit % slices]
        spans.append(list(taken.values()))
    whole = [k for group in spans for k in group if k == problem.K]
    shared = len(whole) < tiles
    fields = {"M": problem.M, "N": problem.N, "tile_M": tile.M, "tile_N": tile.N}
    fields |= {"slices": slices, "stripes": stripes}
    shares = Shares(
        (2 * stripes, tile.M, tile.N), "reduce_striped", "StripedReduceParams", fields, (tile.N, tile.M, stripes - 1),
        are_some=bool(whole),
    )  # fmt: skip
    options = tile.options(problem, (stripes, 1, 1)) | options
    result, counters = run_product(kernel, problem, k_per_slice, {}, options, shares if shared else None)
    if counted:
        tile.check_work(spans, counters)
    return result


def run_tiles(kernel: str, problem: Problem, *, parts: int = 1, **options: Any) -> torch.Tensor:
    """Runs any staged kernel. `parts` is the number of stripes, or about the number of slices of K."""
    if kernel in STRIPED:
        return run_striped(kernel, problem, k_per_slice=64, stripes=parts, **options)
    return run_staged(kernel, problem, slices=parts, **options)
