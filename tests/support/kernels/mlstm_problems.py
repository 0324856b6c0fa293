"""One mLSTM sequence: its inputs, exact result and tolerances, and the kernel launches that compute it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.support import mlstm_cases, mlstm_reference
from tests.support.kernels.launch import (
    ELEMENT_NAMES,
    Counters,
    Guarded,
    element_type,
    facts,
    launch,
    number,
    parameters,
    place,
    place_output,
)

EPS = 1e-6


NAMES = ("plain", "remembering", "small", "forgetting", "strong", "kept", "tiny", "nothing", "large", "huge")
REGIMES = dict(zip(NAMES, mlstm_cases.REGIMES, strict=True))


@dataclass(frozen=True)
class Sequence:
    """A sequence, and the memory layout of its tensors."""

    S: int
    DK: int
    DV: int
    chunk_size: int
    B: int = 1
    H: int = 2
    dtype: torch.dtype = torch.float32
    gate_dtype: torch.dtype = torch.float32
    regime: str = "plain"
    m0: float | None = None  # stabilizer of the initial state; None if there is no initial state
    # Memory order [B, S, H, D] instead of [B, H, S, D].
    tokens_first: bool = False
    offset: int = 0  # elements from an aligned address to the start of a tensor
    gap: int = 0  # elements between rows
    vectors: bool = True  # allows vector loads if the tensors are aligned for them
    seed: int = 0

    @property
    def chunks(self) -> int:
        return -(-self.S // self.chunk_size)

    @property
    def heads(self) -> int:
        return self.B * self.H


Inputs = dict[str, torch.Tensor]


@functools.lru_cache(maxsize=16)
def make_inputs(p: Sequence) -> Mapping[str, torch.Tensor]:
    rng = np.random.default_rng([p.seed, p.S, p.DK, p.DV])
    gates = REGIMES[p.regime]

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape))

    inputs = {name: normal(p.B, p.H, p.S, D).to(p.dtype) for name, D in (("q", p.DK), ("k", p.DK), ("v", p.DV))}
    inputs["i"] = (gates.i + gates.spread * normal(p.B, p.H, p.S)).to(p.gate_dtype)
    inputs["f"] = (gates.f + gates.spread * normal(p.B, p.H, p.S)).to(p.gate_dtype)
    if p.m0 is not None:
        inputs["C0"] = normal(p.B, p.H, p.DK, p.DV).float()
        inputs["n0"] = normal(p.B, p.H, p.DK).float()
        inputs["m0"] = torch.full((p.B, p.H), p.m0)
    return inputs


def reference(inputs: Mapping[str, torch.Tensor]) -> mlstm_reference.Result:
    return mlstm_reference.recurrence(**{name: x.double().numpy() for name, x in inputs.items()}, eps=EPS)


def _place_tokens(p: Sequence, tensor: torch.Tensor) -> tuple[Guarded, dict[str, int]]:
    """Places a tensor in the problem's memory order. Returns the memory and the strides of batch, head and token."""
    D = tensor.shape[3] if tensor.dim() == 4 else 1
    step = D + p.gap
    shaped = tensor.reshape(p.B, p.H, -1, D)
    tokens = shaped.shape[2]
    rows = (shaped.transpose(1, 2) if p.tokens_first else shaped).reshape(-1, D)
    buffer = place(rows, offset=p.offset, row_stride=step)
    head, token = (step, p.H * step) if p.tokens_first else (tokens * step, step)
    return buffer, {"batch": p.H * tokens * step, "head": head, "token": token}


@dataclass
class Run:
    """The kernels' buffers and parameters. Each method runs one dispatch and stores its counters."""

    p: Sequence
    inputs: Mapping[str, torch.Tensor]
    options: dict[str, Any]  # passed to `launch`
    save_every: int = 1
    segment: int = 0  # chunks per segment; 0 for all chunks
    counters: dict[str, Counters] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.p
        self.segment = self.segment or p.chunks
        self.slots = self.segment // self.save_every + (self.segment == p.chunks)
        self.stride = -(-p.S // 4) * 4
        self.fields: dict[str, float] = {
            "heads": p.heads,
            "heads_per_batch": p.H,
            "S": p.S,
            "DK": p.DK,
            "DV": p.DV,
            "chunk_size": p.chunk_size,
            "chunks": p.chunks,
            "segment_chunks": p.chunks,
            "save_every": self.save_every,
            "state_slots": self.slots,
            "final_slots": 1,
            "gate_stride": self.stride,
            "gate_type": element_type(p.gate_dtype),
            "flags": number("kMlstmInitialState") if p.m0 is not None else 0,
            "scale": p.DK**-0.5,
            "eps": EPS,
        }
        self.buffers: dict[str, Guarded] = {}
        for name in ("q", "k", "v", "i", "f"):
            self.buffers[name.upper()], strides = _place_tokens(p, self.inputs[name])
            self.fields |= {f"{name}.{dimension}": stride for dimension, stride in strides.items()}
        floats = torch.float32
        if p.m0 is not None:
            self.buffers |= {name: place(self.inputs[name.lower() if name != "C0" else name].reshape(p.heads, -1))
                             for name in ("C0", "N0", "M0")}  # fmt: skip
        self.shapes = {
            "H": (p.B, p.H, p.S, p.DV),
            "OutN": (p.B, p.H, p.S),
            "OutM": (p.B, p.H, p.S),
            "StatesC": (p.B, p.H, self.slots, p.DK, p.DV),
            "StatesN": (p.B, p.H, self.slots, p.DK),
            "StatesM": (p.B, p.H, p.chunks + 1),
            "FinalC": (p.B, p.H, p.DK, p.DV),
            "FinalN": (p.B, p.H, p.DK),
            "FinalM": (p.B, p.H),
            "Gates": (number("kGateVectorCount"), p.heads, self.stride),
            "Chunks": (number("kChunkVectorCount"), p.heads, p.chunks),
        }
        self.buffers |= {name: place_output(s, p.dtype if name == "H" else floats) for name, s in self.shapes.items()}
        vectors = p.vectors and p.DK % 4 == 0 and p.DV % 4 == 0
        self.constants = {
            "vector_activations": vectors and p.offset % 4 == 0 and p.gap % 4 == 0,
            "vector_columns": vectors,
        }

    def read(self, name: str) -> np.ndarray:
        dtype = self.p.dtype if name == "H" else torch.float32
        return self.buffers[name].read(self.shapes[name], dtype).double().numpy()

    def dispatch(
        self, kernel: str, groups: tuple[int, ...], threads: int, shared: int = 0, **fields: float
    ) -> Counters:
        declared = facts()["kernels"][kernel][2]
        buffers: dict[str, Any] = {
            name: buffer for name, buffer in self.buffers.items() if declared >> number(f"kSlot{name}") & 1
        }
        buffers["Params"] = parameters("MlstmParams", **self.fields | fields)
        self.counters[kernel] = launch(
            kernel,
            buffers,
            group=(threads, 1, 1),
            groups=groups,
            element=ELEMENT_NAMES[self.p.dtype],
            constants=self.constants,
            threadgroup_bytes=shared,
            **self.options,
        )
        return self.counters[kernel]

    def gates(self, simdgroups: int = 2, groups: int = 1, flags: int | None = None) -> None:
        flags = number("kMlstmForOutput") if flags is None else flags
        self.dispatch(
            "mlstm_gates", (groups, self.p.heads, 1), 32 * simdgroups, flags=int(self.fields["flags"]) | flags
        )

    def states(self, first: int = 0) -> None:
        tile, p = number("kMlstmStateTile"), self.p
        groups = (-(-p.DV // tile), -(-p.DK // tile), p.heads)
        chunks = min(self.segment, p.chunks - first)
        self.dispatch("mlstm_states", groups, number("kMlstmStateThreads"), first_chunk=first, segment_chunks=chunks)

    def output(self, simdgroups: int = 2, first: int = 0) -> None:
        p = self.p
        chunks = min(self.segment, p.chunks - first)
        columns = -(-p.DV // (number("kMlstmSimdColumns") * simdgroups))
        groups = (columns, chunks * -(-p.chunk_size // number("kMlstmBlock")), p.heads)
        shared = facts()["mlstm_output_bytes"][str(p.chunk_size)]
        self.dispatch("mlstm_output", groups, 32 * simdgroups, shared, first_chunk=first, segment_chunks=chunks)

    def step(self, simdgroups: int = 2) -> None:
        shared = facts()["mlstm_step_bytes"][simdgroups]
        groups = (-(-self.p.DV // number("kMlstmStepColumns")), self.p.heads, 1)
        self.dispatch("mlstm_step", groups, 32 * simdgroups, shared)


def run(
    p: Sequence,
    *,
    inputs: Mapping[str, torch.Tensor] | None = None,
    gate_simdgroups: int = 2,
    simdgroups: int = 2,
    segment: int = 0,
    **options: Any,
) -> Run:
    """Runs the whole sequence in the planner's order: the gates once, then states and output of each segment."""
    result = Run(p, inputs if inputs is not None else make_inputs(p), options, segment=segment)
    result.gates(gate_simdgroups)
    for first in range(0, p.chunks, result.segment):
        result.states(first)
        result.output(simdgroups, first)
    return result


def _relative(got: np.ndarray, exact: np.ndarray) -> float:
    largest = np.abs(exact).max(initial=0.0)
    return float(np.abs(got - exact).max(initial=0.0) / (largest if largest > 0 else 1.0))


def check_close(p: Sequence, got: Run, exact: mlstm_reference.Result) -> None:
    """Checks numerator, states, h, denominator and stabilizers of fp32 kernels, and only h of 16-bit kernels."""
    h, N, M = (got.read(name) for name in ("H", "OutN", "OutM"))
    # If m0 is 20 or more, the floor of the denominator is so small that the denominator is ill-conditioned.
    well = not REGIMES[p.regime].ill_conditioned and (p.m0 or 0.0) < 20
    if p.dtype is torch.float32:
        finite = exact.N < 1e30  # for larger N, h is subnormal
        assert np.isinf(N[exact.N > 3.5e38]).all(), "N beyond the range of fp32"
        pairs = ((h, N), (exact.h, exact.N))
        numerator, exact_numerator = (h[finite] * (N[finite] + EPS)[:, None] for h, N in pairs)
        assert _relative(numerator, exact_numerator) < 5e-5, "numerator"
        assert (np.abs(N - exact.N)[finite] <= (2e-4 if well else 1e-2) * exact.N[finite]).all(), "N"
    tolerance = {torch.float32: 2e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}[p.dtype]
    assert _relative(h, exact.h) < (tolerance if well else 1e-2), "h"
    assert _stabilisers_close(M, exact.M), "M"
    check_states(p, got, exact, np.s_[:, :, -1])


def check_states(p: Sequence, got: Run, exact: mlstm_reference.Result, last: Any) -> None:
    for name, state in (("C", exact.C), ("N", exact.n)):
        assert _relative(got.read(f"Final{name}"), state[last]) < 1e-5, f"final {name}"
    assert _stabilisers_close(got.read("FinalM"), exact.m[last]), "final m"


def _stabilisers_close(got: np.ndarray, exact: np.ndarray) -> bool:
    # For |m| of 256 or more, adjacent fp32 numbers are 3.1e-5 apart, so one rounding errs by up to 1.55e-5. The m of a
    # token is rounded twice: the m before a chunk is stored as fp32, and the sum that contains it is rounded again. The
    # total error can therefore exceed 2e-5.
    return bool((np.abs(got - exact) <= np.maximum(2e-5, np.spacing(np.abs(exact).astype(np.float32)))).all())
