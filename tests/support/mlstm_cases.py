"""Inputs for the mLSTM tests: several distributions of gates, each with its allowed error."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Regime:
    """Random gates with the means f and i.

    `ill_conditioned` states that the denominator nearly cancels but stays above its floor.
    """

    f: float
    i: float
    spread: float = 1.0
    ill_conditioned: bool = False

    def __str__(self) -> str:
        return f"f{self.f:g}_i{self.i:g}"


REGIMES = [
    Regime(0, 0),
    Regime(3, 0),
    Regime(5, -10),
    Regime(-8, 0, 3),
    Regime(-120, 0),
    Regime(50, 0),
    Regime(3, -20),
    Regime(3, -1e4, 0),
    Regime(0, 8, 3, ill_conditioned=True),
    Regime(3, 20, ill_conditioned=True),
]


@dataclass
class Problem:
    """q, k, v, i, f and the initial state, on the CPU."""

    inputs: tuple[torch.Tensor, ...]
    state: dict[str, torch.Tensor]

    def on(self, device: str) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        return tuple(x.to(device) for x in self.inputs), {name: x.to(device) for name, x in self.state.items()}

    def arrays(self) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
        """Returns the inputs and the state as fp64 arrays."""
        return tuple(x.double().numpy() for x in self.inputs), {n: x.double().numpy() for n, x in self.state.items()}


def make(
    B=2, H=3, S=64, DK=24, DV=40, regime=REGIMES[1], m0=None, dtype=torch.float32, gate_dtype=None, seed=0
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, to=torch.float32):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(to)

    gates = gate_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
    states = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = normal(B, H, S, DK, to=dtype), normal(B, H, S, DK, to=dtype), normal(B, H, S, DV, to=dtype)
    i = (regime.i + regime.spread * normal(B, H, S, to=torch.float64)).to(gates)
    f = (regime.f + regime.spread * normal(B, H, S, to=torch.float64)).to(gates)
    state = {}
    if m0 is not None:
        state = {
            "C0": normal(B, H, DK, DV, to=states),
            "n0": normal(B, H, DK, to=states),
            "m0": (m0 + normal(B, H, to=torch.float64)).to(states),
        }
    return Problem((q, k, v, i, f), state)


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def relative_to_max(got: torch.Tensor, expected: np.ndarray) -> float:
    """Returns the largest error divided by the largest expected value, or by 1 if all expected values are 0.

    Returns infinity if there is a NaN.
    """
    error = np.abs(array(got) - expected).max(initial=0.0)
    largest = np.abs(expected).max(initial=0.0)
    return float("inf") if np.isnan(error) else float(error / largest if largest else error)
