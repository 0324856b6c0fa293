"""Explains why the planner chooses a candidate for a product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_marlin_metal.gpu.planning import GemmPlan, PlanCandidate, PlannedDispatch, plan

# What the model assumes in addition to the figures of the GPU and the instruction counts of the kernels.
ASSUMPTIONS = (
    "Every GPU executes as many instructions as Mesa's compiler generates for the M1; Apple's compiler may differ by "
    "10 to 20 %.",
    "Weights are not in any cache, and nothing else runs on the GPU.",
    "A kernel that does not load ahead waits wherever its compiled loop waits: 311 ns for memory, 64 clocks for a "
    "cache. Other simdgroups on the core use that time, if there are any.",
    "Instructions and matrix operations overlap in part. How much they overlap was found for each GPU family by "
    "comparing the model with published times of other kernels.",
    "Memory time and compute time overlap, but a twentieth of the shorter time is added to the longer time.",
    "Threadgroups start in order, x first, and spread evenly over the cores.",
    "If several row blocks read the same weights, each block reads them from memory again. These reads are twice as "
    "fast if the weight fills at most half of the system-level cache. In gemv, row blocks that read the same weights "
    "start together, and all but the first find the weights in L2.",
    "In a mixture, each token chooses its experts at random, and all experts are equally likely. The rows of an expert "
    "fill blocks of rows, and only its last block can be partly filled. Threadgroups without rows cost nothing.",
    "Bank conflicts, the register cache, barriers and the rate of threadgroup memory cost nothing.",
    "A dispatch that depends on the previous one takes 6 us in addition to its work. Published figures are 3 to 10 us.",
    "On chips of two dies (Ultra), weights of less than 50 MB are read at 0.8 times the rate of larger ones.",
    "The tensor units of an M5 multiply at the rate that MLX's dense product reached on an M5. The other instructions "
    "of the kernel are counted in code for the M1's GPU.",
    "If a figure of a chip is unknown, it is taken from the most similar chip. The table of chips marks such figures.",
)

_REASONS = {
    "launch": "the launch itself, because there is too little work for anything else to matter",
    "dram": "memory, which delivers the weights at its rate",
    "l2": "L2, because simdgroups load the same activations again and again",
    "issue": "instruction issue, for decoding and addresses",
    "complex": "the integer and complex unit",
    "matrix": "the matrix products",
    "occupancy": "waiting, because too few simdgroups hide latency or some cores have less to do than others",
    "dense": "the dense product of torch.matmul",
}


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`, which prints as text.

    Attributes:
        plan: the product's plan with all candidates.
        bound: the resource that limits the longest dispatch of the chosen plan.
        rivals: the cheapest candidate of every other variant, cheapest first.
        assumptions: what the predicted time assumes.
    """

    plan: GemmPlan
    bound: str
    rivals: tuple[PlanCandidate, ...]
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        chosen, cheapest = self.plan.chosen, self.plan.candidates[0]
        lines = [
            self.plan.title,
            f"taken: {_named(chosen)}: {_us(chosen.seconds)} us predicted, bound by {_REASONS[self.bound]}",
            *map(_spent, chosen.dispatches),
        ]
        for rival in self.rivals:
            ratio = rival.seconds / chosen.seconds
            reason = _REASONS[rival.bound]
            lines.append(f"instead of {_named(rival)}: {_us(rival.seconds)} us, {ratio:.2f} x, bound by {reason}")
        if cheapest is not chosen:
            lines.append(f"{cheapest.variant} is cheapest by the model, but used only if the tuner has measured it")
        lines.append("assumed:")
        lines += [f"  - {assumption}" for assumption in self.assumptions]
        return "\n".join(lines)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _named(candidate: PlanCandidate) -> str:
    return f"{candidate.variant} {'x'.join(map(str, candidate.tile))}"


def _spent(dispatch: PlannedDispatch) -> str:
    memory = f"memory {_us(dispatch.dram_seconds)} ({dispatch.dram_bytes / 1e6:.2f} MB)"
    alu = f"issue {_us(dispatch.issue_seconds)} + matrix {_us(dispatch.matrix_seconds)}"
    compute = f"compute {_us(dispatch.compute_seconds)} ({alu}, beside complex {_us(dispatch.complex_seconds)})"
    held = f"{dispatch.occupancy.simdgroups} simdgroups a core (limit: {dispatch.occupancy.limit})"
    return (
        f"  {dispatch.function}: {_us(dispatch.seconds)} us = launch {_us(dispatch.launch_seconds)} + the longest of "
        f"{memory}, L2 {_us(dispatch.l2_seconds)}, {compute}; {held}, {dispatch.waves:.2f} waves"
    )


def explain(M: int, N: int, K: int, **problem: Any) -> Explanation:
    """Explains the planner's choice for a product: the plan, what limits it, and the alternatives.

    Args:
        M: rows of the activations.
        N: columns of the weight.
        K: rows of the weight.
        **problem: further arguments of `torch_marlin_metal.plan`.

    Raises:
        ValueError: an argument is out of range or unknown; the message names it.
    """
    found = plan(M, N, K, **problem)
    rivals: dict[str, PlanCandidate] = {}
    for candidate in found.candidates:
        if candidate.variant != found.chosen.variant:
            rivals.setdefault(candidate.variant, candidate)
    return Explanation(found, found.chosen.bound, tuple(rivals.values()), ASSUMPTIONS)
