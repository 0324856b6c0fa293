"""The mLSTM of docs/use/mlstm.md in NumPy fp64: the recurrence, and the chunkwise form with the values at chunk borders."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Result:
    """h, N and M of every token, and the state after every token. `C[:, :, 0]` is the initial state."""

    h: Array  # [B, H, S, DV]
    N: Array  # [B, H, S]
    M: Array  # [B, H, S]
    C: Array  # [B, H, S + 1, DK, DV]
    n: Array  # [B, H, S + 1, DK]
    m: Array  # [B, H, S + 1]


def log_sigmoid(f: Array) -> Array:
    return np.minimum(f, 0) - np.log1p(np.exp(-np.abs(f)))


def recurrence(q, k, v, i, f, C0=None, n0=None, m0=None, eps=1e-6) -> Result:
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


def by_chunks(q, k, v, i, f, L, C0=None, n0=None, m0=None, eps=1e-6) -> Result:
    """Computes the mLSTM in chunks of L tokens. The result has C, n and m only at the borders of chunks."""
    q, k, v, i, f = (np.asarray(x, dtype=np.float64) for x in (q, k, v, i, f))
    B, H, S, DK = q.shape
    DV, NC = v.shape[-1], S // L
    C, n, m = np.zeros((B, H, NC + 1, DK, DV)), np.zeros((B, H, NC + 1, DK)), np.zeros((B, H, NC + 1))
    if C0 is not None:
        C[:, :, 0], n[:, :, 0], m[:, :, 0] = C0, n0, m0
    h, N, M = np.zeros((B, H, S, DV)), np.zeros((B, H, S)), np.zeros((B, H, S))
    for c in range(NC):
        at = np.s_[:, :, c * L : (c + 1) * L]
        qs, ks, vs, gate = q[at] * DK**-0.5, k[at], v[at], i[at]
        b = np.cumsum(log_sigmoid(f[at]), -1)
        D = np.where(np.tri(L, dtype=bool), b[..., :, None] - b[..., None, :] + gate[..., None, :], -np.inf)
        M[at] = stabiliser = np.maximum(D.max(-1), b + m[:, :, c, None])
        weights = np.einsum("bhjd,bhld->bhjl", qs, ks) * np.exp(D - stabiliser[..., None])
        decayed = qs * np.exp(b + m[:, :, c, None] - stabiliser)[..., None]
        den = np.einsum("bhjd,bhd->bhj", decayed, n[:, :, c]) + weights.sum(-1)
        N[at] = np.maximum(np.abs(den), np.exp(-stabiliser))
        h[at] = (decayed @ C[:, :, c] + weights @ vs) / (N[at][..., None] + eps)
        a = b[..., -1:] - b + gate
        m[:, :, c + 1] = np.maximum(b[..., -1] + m[:, :, c], a.max(-1))
        whole = np.exp(b[..., -1] + m[:, :, c] - m[:, :, c + 1])
        keys = ks * np.exp(a - m[:, :, c + 1, None])[..., None]
        C[:, :, c + 1] = whole[..., None, None] * C[:, :, c] + np.swapaxes(keys, -1, -2) @ vs
        n[:, :, c + 1] = whole[..., None] * n[:, :, c] + keys.sum(-2)
    return Result(h, N, M, C, n, m)
