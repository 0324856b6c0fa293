"""Times the planner's candidates for products, and stores correct candidates that beat the planner's choice."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from torch_marlin_metal.extension import native
from torch_marlin_metal.gpu.planning import PlanCandidate, first_of_each_variant
from torch_marlin_metal.gpu.tuning.chains import COLD_BYTES, Chain, gemm_chain, interleave, rotating
from torch_marlin_metal.gpu.tuning.errors import check
from torch_marlin_metal.gpu.tuning.products import Product
from torch_marlin_metal.gpu.tuning.table import Machine, TunedRange, TuningTable
from torch_marlin_metal.ops.gemm import gemm
from torch_marlin_metal.packed_weight import PackedWeight

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
# The tuner times one tile of each variant, then further tiles in the planner's order, up to this total number.
MOST_CANDIDATES = 8
# The tuner omits further tiles whose estimated time exceeds the best estimate by more than this factor.
SLOWEST = 3.0
# A candidate replaces the planner's choice if it is faster by this factor and the gain exceeds the rounds' spread.
MARGIN = 1.02
# Variants that round the weight are candidates only from this number of rows on, so not in decoding.
ROUNDING_ROWS = 64

# The tuner compares results with fp64 in all rows and in this many randomly selected columns.
COMPARED_COLUMNS = 256

Timer = Callable[[Mapping[str, Chain]], dict[str, list[float]]]


def tune(
    products: Sequence[Product],
    *,
    rows: Sequence[int] = ROWS,
    timer: Timer = interleave,
    compare: bool = True,
    cold_bytes: int = COLD_BYTES,
    progress: bool = True,
) -> TuningTable:
    """Measures the candidates for products on this machine's GPU.

    For each product and number of rows, the tuner first compares the candidates' results with fp64. A candidate that is
    wrong or fails is never chosen, and a warning names it. Then the tuner times candidates of all variants in turn and
    compares their medians. A candidate runs as a chain of dependent products whose weights are not in the caches. A
    measured choice applies only to exactly the measured number of rows. For other numbers, the planner's model chooses.

    Args:
        products: the products to measure.
        rows: the numbers of rows to measure, ascending.
        timer: measures chains by name, and returns one cost per round for each. `interleave` measures times.
        compare: True to compare results with fp64.
        cold_bytes: total bytes of a weight's clones, which a chain uses in turn.
        progress: True to show a progress bar.

    Returns:
        A table for `save` and `use`.

    Raises:
        RuntimeError: torch has no mps device here, or all candidates for a product are wrong.
        ValueError: `rows` are not ascending positive numbers.
    """
    machine = Machine.current()
    if not rows or list(rows) != sorted(set(rows)) or rows[0] < 1:
        raise ValueError(f"tune: rows: expected ascending positive numbers, got {list(rows)}")
    found = []
    with tqdm(total=len(products) * len(rows), unit="product", disable=None if progress else True) as bar:
        for product in products:
            weight = product.make_weight("cpu")
            expected = ExactProduct(weight)
            weights = rotating(weight.to("mps"), cold_bytes)
            for M in rows:
                bar.set_description(f"{product} M={M}")
                tried, model = candidates(product, M)
                a = torch.randn(M, product.K, dtype=product.torch_dtype, device="mps")
                faults = expected.faults(a, weights(0), tried) if compare else {}
                for name, fault in faults.items():
                    warnings.warn(f"tune: {product} M={M}: {name} is left out: {fault}", stacklevel=2)
                if len(faults) == len(tried):
                    raise RuntimeError(f"tune: {product} M={M}: no candidate is right: {faults[model]}")
                chains = {name: gemm_chain(a, weights, name) for name in tried if name not in faults}
                found.append(_winner(product, M, model, timer(chains), faults))
                bar.update()
    return TuningTable(machine, tuple(found))


class ExactProduct:
    """Some columns of a weight's products, computed in fp64 on the CPU."""

    def __init__(self, weight: PackedWeight) -> None:
        generator = torch.Generator().manual_seed(0)
        self.columns = torch.randperm(weight.N, generator=generator, device="cpu")[:COMPARED_COLUMNS]
        self.dense = weight.dequantize()[:, self.columns].double()

    def faults(self, a: Tensor, weight: PackedWeight, names: Sequence[str]) -> dict[str, str]:
        """Returns the error messages of the variants in `names` that are wrong for activations `a [M, K]`."""
        expected = a.cpu().double() @ self.dense
        columns = self.columns.to(a.device)
        found = {}
        for name in names:
            try:
                check(gemm(a, weight, variant=name)[:, columns], expected, "its product")
            except RuntimeError as error:
                found[name] = str(error).splitlines()[0]
        return found


def candidates(product: Product, M: int) -> tuple[list[str], str]:
    """Returns the names of the candidates to time, and the name of the planner's choice."""
    planned = product.plan(M)
    chosen = planned.chosen
    exact = [candidate for candidate in planned.candidates if not _rounds_weight(candidate)]
    names = [candidate.name for candidate in first_of_each_variant((chosen, *exact))]
    further = [candidate.name for candidate in exact if candidate.seconds <= SLOWEST * chosen.seconds]
    names += [name for name in further if name not in names][: max(0, MOST_CANDIDATES - len(names))]
    if M >= ROUNDING_ROWS:
        names += [candidate.name for candidate in planned.candidates if _rounds_weight(candidate)]
    return names, chosen.name


def _rounds_weight(candidate: PlanCandidate) -> bool:
    rounds: bool = native.gemm_variants()[candidate.variant]
    return rounds


def _winner(
    product: Product, M: int, model: str, costs: Mapping[str, list[float]], faults: dict[str, str]
) -> TunedRange:
    medians = {name: statistics.median(times) for name, times in costs.items()}
    best = min(medians, key=medians.__getitem__)
    if model in faults:
        return TunedRange(product, M, M, best, medians[best], model, 1.0, medians, faults)
    ratios = [time / other for time, other in zip(costs[model], costs[best], strict=True)]
    speedup = statistics.median(ratios)
    if speedup < max(MARGIN, 1 + _spread(ratios)):
        best, speedup = model, 1.0
    return TunedRange(product, M, M, best, medians[best], model, speedup, medians, faults)


def _spread(ratios: Sequence[float]) -> float:
    """Returns the difference between the upper and lower quartile of the rounds' ratios."""
    if len(ratios) < 2:
        return 0.0
    low, _, high = statistics.quantiles(ratios, n=4)
    return high - low
