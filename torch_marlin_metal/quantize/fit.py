"""Selects a format for each layer of a model, so that the model fits in a memory limit with the smallest error."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_marlin_metal.quantize.recipe import LayerFormat, Recipe
from torch_marlin_metal.sizes import human_size

# The candidate formats. The recipe's formats are candidates too.
CANDIDATES: tuple[LayerFormat, ...] = (
    *(("uint4b8", 128), ("q4_k", 32), ("uint5b16", 128), ("q5_k", 32)),
    *(("uint6b32", 128), ("q6_k", 16), ("uint8b128", 128)),
)
SAMPLE_ROWS = 256  # rows of each matrix for which a format's error is measured
CURVE_POINTS = 12
STEPS = 1 << 16


@dataclass
class Unit:
    """Layers that must have the same format, because they are computed together or share a weight.

    Attributes:
        names: the names of the layers.
        sizes: for each candidate, the bytes of the layers' weights.
        errors: for each candidate, the sum over the weights of the squared error relative to the weight. With
            calibration, an estimate of the KL divergence of the model's predictions.
        weights: the number of weight elements.
    """

    names: list[str]
    sizes: list[int]
    errors: list[float]
    weights: int

    def join(self, other: "Unit") -> None:
        """Adds the layers of another unit."""
        self.names += other.names
        self.sizes = [a + b for a, b in zip(self.sizes, other.sizes, strict=True)]
        self.errors = [a + b for a, b in zip(self.errors, other.errors, strict=True)]
        self.weights += other.weights


@dataclass(frozen=True)
class Fit:
    """A selection of formats.

    Attributes:
        candidates: the formats and group sizes to select from.
        units: the layers whose format was selected.
        choice: for each unit, the index of its candidate.
        fixed: the bytes of the model that do not depend on the selection.
    """

    candidates: tuple[LayerFormat, ...]
    units: list[Unit]
    choice: list[int]
    fixed: int

    @property
    def total_bytes(self) -> int:
        """Returns the bytes of the complete model."""
        return self.fixed + sum(unit.sizes[index] for unit, index in zip(self.units, self.choice, strict=True))

    @property
    def error(self) -> float:
        """Returns the sum of the errors of all units."""
        return sum(unit.errors[index] for unit, index in zip(self.units, self.choice, strict=True))

    def chosen(self) -> dict[str, LayerFormat]:
        """Returns the format and group size of each layer, by the layer's name."""
        pairs = zip(self.units, self.choice, strict=True)
        return {name: self.candidates[index] for unit, index in pairs for name in unit.names}

    @property
    def bits(self) -> float:
        """Returns the bits per weight element, including scales, in the layers of `units`."""
        return 8 * (self.total_bytes - self.fixed) / max(sum(unit.weights for unit in self.units), 1)

    def curve(self) -> list["Fit"]:
        """Returns about a dozen selections with the smallest error, from the fewest bytes to the most."""
        low, high = _bounds(self.units)
        steps = {low + (high - low) * step // CURVE_POINTS for step in range(CURVE_POINTS + 1)}
        best = _Best(self.units)
        return [replace(self, choice=best.choice(limit)) for limit in sorted(steps)]

    def plot(self) -> str:
        """Formats a line for each selection of the curve: bits, bytes, error, and a bar that grows with log(error)."""
        fits = sorted([*self.curve(), self], key=lambda fit: fit.total_bytes)
        logs = [math.log10(max(fit.error, 1e-12)) for fit in fits]
        low, span = min(logs), max(max(logs) - min(logs), 1e-12)
        lines = [
            f"{fit.bits:5.2f} bits {human_size(fit.total_bytes):>8}  error {fit.error:8.2e} "
            f"{'#' * round(1 + 39 * (log - low) / span)}{' < chosen' if fit is self else ''}"
            for fit, log in zip(fits, logs, strict=True)
        ]
        return "\n".join(lines)

    def summary(self) -> str:
        """Formats a line with the number of layers in each format, the bytes and the error."""
        counts = Counter(f"{name} g{size}" for name, size in self.chosen().values())
        kinds = ", ".join(f"{count} in {kind}" for kind, count in counts.items())
        return f"{kinds}: {human_size(self.total_bytes)}, {self.bits:.2f} bits a weight, error {self.error:.4g}"


def candidates_of(recipe: Recipe) -> tuple[LayerFormat, ...]:
    """Returns the formats to select from: `CANDIDATES` and the recipe's formats."""
    own = [recipe.size_of("")]
    if recipe.vocabulary:
        own.append(recipe.size_of(next(iter(recipe.vocabulary))))
    return tuple(dict.fromkeys((*own, *CANDIDATES)))


def measured(
    name: str,
    shape: tuple[int, int],
    samples: Iterable[Tensor],
    copies: int,
    recipe: Recipe,
    candidates: tuple[LayerFormat, ...],
) -> Unit:
    """Measures a layer's bytes and error in each candidate format.

    Args:
        name: the layer's name.
        shape: the shape `(N, K)` of the weight.
        samples: rows `[R, K]` of one or more of the layer's matrices.
        copies: the number of matrices with this shape: the number of experts, or 1.
        recipe: supplies the method and the options of `quantize_weight`.
        candidates: the formats and group sizes to measure.

    Raises:
        ValueError: a candidate cannot represent the layer.
    """
    recipes = [recipe.in_format(chosen, size) for chosen, size in candidates]
    empty = torch.empty(shape, device="meta")
    sizes = [copies * sum(one.nbytes for one in each.quantize(name, empty).tensors().values()) for each in recipes]
    differences, norm = [0.0] * len(candidates), 0.0
    for rows in samples:
        exact = rows.detach().float()
        norm += float(exact.square().sum())
        for index, each in enumerate(recipes):
            differences[index] += float((each.quantize(name, exact).dequantize().T - exact).square().sum())
    errors = [difference / norm if norm else 0.0 for difference in differences]
    return Unit([name], sizes, errors, copies * shape[0] * shape[1])


def sample(matrix: Tensor) -> Tensor:
    """Returns at most `SAMPLE_ROWS` rows of a matrix, evenly spaced."""
    return matrix[:: -(-matrix.shape[0] // SAMPLE_ROWS)]


def choose(
    op: str,
    candidates: tuple[LayerFormat, ...],
    units: list[Unit],
    vocabulary: frozenset[str],
    fixed: int,
    limit: int,
) -> Fit:
    """Returns the selection with the smallest error among those that need at most `limit` bytes.

    The selection is at least as good as any pair of candidates, one for the vocabulary and one for all other units.

    Raises:
        ValueError: the smallest possible size exceeds the limit. The message states this size.
    """
    least = fixed + _bounds(units)[0]
    if least > limit:
        raise ValueError(
            f"{op}: memory: expected at least {human_size(least)} ({least} bytes), the model's size in the "
            f"smallest formats ({human_size(fixed)} are not quantized); got {human_size(limit)}"
        )
    found = [_Best(units).choice(limit - fixed)]
    for most in range(len(candidates)):
        for words in range(len(candidates)):
            found.append([words if vocabulary.intersection(unit.names) else most for unit in units])
    fits = [Fit(candidates, units, choice, fixed) for choice in found]
    return min((fit for fit in fits if fit.total_bytes <= limit), key=lambda fit: fit.error)


def _bounds(units: list[Unit]) -> tuple[int, int]:
    return sum(min(unit.sizes) for unit in units), sum(max(unit.sizes) for unit in units)


class _Best:
    """The best selection for every limit, by dynamic programming over the units and the bytes available to them.

    Bytes are counted in at most `STEPS` steps, rounded up. `_filled` uses the bytes that are lost by rounding.
    """

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._low, high = _bounds(units)
        self._step = max(1, -(-(high - self._low) // STEPS))
        best = torch.zeros((high - self._low) // self._step + 1, dtype=torch.float64, device="cpu")
        # For each unit: the best candidate for each number of steps left, and the steps that each candidate takes.
        self._picks: list[tuple[Tensor, list[int]]] = []
        for unit in units:
            extra = [-(-(size - min(unit.sizes)) // self._step) for size in unit.sizes]
            errors = best.new_full((len(extra), len(best)), torch.inf)
            for at, (steps, error) in enumerate(zip(extra, unit.errors, strict=True)):
                if steps < len(best):
                    errors[at, steps:] = best[: len(best) - steps] + error
            best, picks = errors.min(0)
            self._picks.append((picks.to(torch.uint8), extra))

    def choice(self, limit: int) -> list[int]:
        """Returns the index of a candidate for each unit. The limit must be at least the fewest possible bytes."""
        left = min((limit - self._low) // self._step, len(self._picks[0][0]) - 1 if self._picks else 0)
        found = []
        for picks, extra in reversed(self._picks):
            found.append(int(picks[left]))
            left -= extra[found[-1]]
        return _filled(self._units, found[::-1], limit)


def _filled(units: list[Unit], choice: list[int], limit: int) -> list[int]:
    """Spends the remaining bytes on the layers whose error decreases most per byte."""
    choice = list(choice)
    left = limit - sum(unit.sizes[at] for unit, at in zip(units, choice, strict=True))
    while True:
        steps = []
        for place, unit in enumerate(units):
            now = choice[place]
            for at, (size, error) in enumerate(zip(unit.sizes, unit.errors, strict=True)):
                more, gain = size - unit.sizes[now], unit.errors[now] - error
                if gain > 0 and more <= left:
                    steps.append((gain / more if more > 0 else float("inf"), place, at))
        if not steps:
            return choice
        _, place, at = max(steps)
        left -= units[place].sizes[at] - units[place].sizes[choice[place]]
        choice[place] = at
