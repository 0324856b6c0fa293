"""The mLSTM in NumPy and fp64, from docs/mlstm.md: the recurrence, and the form by chunks for its inner quantities."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Result:
    """Of every token: h, N, M and the state after it; `C[..., 0, :, :]` is the initial state."""

    h: Array  # [B, H, S, DV]
    N: Array  # [B, H, S]
    M: Array  # [B, H, S]
    C: Array  # [B, H, S + 1, DK, DV]
    n: Array  # [B, H, S + 1, DK]
    m: Array  # [B, H, S + 1]


def log_sigmoid(f: Array) -> Array:
    return np.minimum(f, 0) - np.log1p(np.exp(-np.abs(f)))


def recurrence(q, k, v, i, f, C0=None, n0=None, m0=None, eps=1e-6) -> Result:
    """Token by token."""
    q, k, v, i, f = (np.asarray(x, dtype=np.float64) for x in (q, k, v, i, f))
    B, H, S, DK = q.shape
    DV = v.shape[-1]
    C = np.zeros((B, H, S + 1, DK, DV))
    n = np.zeros((B, H, S + 1, DK))
    m = np.zeros((B, H, S + 1))
    if C0 is not None:
        C[:, :, 0], n[:, :, 0], m[:, :, 0] = C0, n0, m0
    h, N = np.zeros((B, H, S, DV)), np.zeros((B, H, S))
    decay = log_sigmoid(f)
    for t in range(S):
        m[:, :, t + 1] = np.maximum(decay[:, :, t] + m[:, :, t], i[:, :, t])
        forget = np.exp(decay[:, :, t] + m[:, :, t] - m[:, :, t + 1])
        key = np.exp(i[:, :, t] - m[:, :, t + 1])[..., None] * k[:, :, t]
        C[:, :, t + 1] = forget[..., None, None] * C[:, :, t] + key[..., :, None] * v[:, :, t, None, :]
        n[:, :, t + 1] = forget[..., None] * n[:, :, t] + key
        query = q[:, :, t] * DK**-0.5
        numerator = np.einsum("bhd,bhdv->bhv", query, C[:, :, t + 1])
        with np.errstate(over="ignore"):
            floor = np.exp(-m[:, :, t + 1])
        N[:, :, t] = np.maximum(np.abs((query * n[:, :, t + 1]).sum(-1)), floor)
        h[:, :, t] = numerator / (N[:, :, t, None] + eps)
    return Result(h, N, m[:, :, 1:], C, n, m)
