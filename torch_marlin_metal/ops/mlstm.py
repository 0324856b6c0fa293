"""The mLSTM operators `torch.ops.torch_marlin_metal.mlstm*` as Python functions.

The mLSTM is the matrix memory of the xLSTM (Beck et al., "xLSTM: Extended Long Short-Term Memory", arXiv:2405.04517).
It is computed in chunks as in Beck et al., "Tiled Flash Linear Attention", arXiv:2503.14376. Formulas:
docs/use/mlstm.md.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_marlin_metal import extension  # noqa: F401  registers the operators

_ops = torch.ops.torch_marlin_metal


class MLSTMState(NamedTuple):
    """The state of an mLSTM in stabilized units: the memory is `exp(m) * C`, and the normalizer is `exp(m) * n`.

    All tensors are float32, or float64 if the inputs are float64.

    Attributes:
        C: scaled memory `[B, H, DK, DV]`.
        n: scaled normalizer `[B, H, DK]`.
        m: stabilizer `[B, H]`, the logarithm of the scale.

    Examples:
        >>> state = tmm.xlstm.MLSTMState(torch.zeros(1, 2, 32, 48), torch.zeros(1, 2, 32), torch.zeros(1, 2))
        >>> state.C.shape
        torch.Size([1, 2, 32, 48])
    """

    C: Tensor
    n: Tensor
    m: Tensor


def _tensors(op: str, state: MLSTMState, argument: str = "state") -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(state, tuple | list) or len(state) != 3:
        got = f"{len(state)} values" if isinstance(state, tuple | list) else type(state).__name__
        raise ValueError(f"torch_marlin_metal::{op}: {argument}: expected the tensors C, n and m, got {got}")
    return state[0], state[1], state[2]


def _initial(op: str, state: MLSTMState | None) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    return (None, None, None) if state is None else _tensors(op, state)


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState | None = None,
    *,
    chunk_size: int = 0,
    eps: float = 1e-6,
) -> tuple[Tensor, MLSTMState]:
    """Runs an mLSTM over a sequence of any length. Returns the outputs and the final state.

    `mlstm` is differentiable once, with respect to all tensors, and runs on the CPU and on mps. The CPU also supports
    float64, for which it computes token by token.

    Args:
        q: queries `[B, H, S, DK]`, float16, bfloat16 or float32, any strides. `mlstm` scales them by `DK ** -0.5`.
        k: keys `[B, H, S, DK]` in the dtype of `q`, not scaled.
        v: values `[B, H, S, DV]` in the dtype of `q`.
        i: input gates `[B, H, S]` before the exponential function, float16, bfloat16 or float32.
        f: forget gates `[B, H, S]` before the sigmoid function, in the dtype of `i`.
        state: the state before the first token. None means zeros for C, n and m.
        chunk_size: tokens per chunk: 16, 32, 64, 128 or 256, or 0 for the planner's choice. It affects results only by
            rounding.
        eps: a number added to the denominator.

    Returns:
        `h [B, H, S, DV]` in the dtype of `q`, and the state after the last token.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value. The message states what was expected.

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 100, D) for D in (32, 32, 48))  # [B, H, S, D]
        >>> i, f = torch.randn(1, 2, 100), 3 + torch.randn(1, 2, 100)
        >>> h, state = tmm.xlstm.mlstm(q, k, v, i, f)
        >>> h.shape
        torch.Size([1, 2, 100, 48])
    """
    C0, n0, m0 = _initial("mlstm", state)
    h, C, n, m = _ops.mlstm(q, k, v, i, f, C0=C0, n0=n0, m0=m0, chunk_size=chunk_size, eps=eps)
    return h, MLSTMState(C, n, m)


def mlstm_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState, *, eps: float = 1e-6
) -> tuple[Tensor, MLSTMState]:
    """Runs an mLSTM over one token, for decoding.

    Args:
        q: query `[B, H, DK]`, as in `mlstm`.
        k: key `[B, H, DK]`.
        v: value `[B, H, DV]`.
        i: input gate `[B, H]`.
        f: forget gate `[B, H]`.
        state: the state before the token. It is not changed.
        eps: a number added to the denominator.

    Returns:
        `h [B, H, DV]` in the dtype of `q`, and the state after the token, in new tensors.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value.

    Examples:
        >>> state = tmm.xlstm.MLSTMState(torch.zeros(1, 2, 32, 48), torch.zeros(1, 2, 32), torch.zeros(1, 2))
        >>> q, k, v = (torch.randn(1, 2, D) for D in (32, 32, 48))  # one token: [B, H, D]
        >>> h, state = tmm.xlstm.mlstm_step(q, k, v, torch.randn(1, 2), torch.randn(1, 2), state)
        >>> h.shape
        torch.Size([1, 2, 48])
    """
    h, C, n, m = _ops.mlstm_step(q, k, v, i, f, *_tensors("mlstm_step", state), eps=eps)
    return h, MLSTMState(C, n, m)


def mlstm_states(
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState | None = None,
    *,
    chunk_size: int,
    save_states_every: int = 1,
) -> MLSTMState:
    """Computes the first half of `mlstm`, the states between chunks. Not differentiable.

    Args:
        k: keys `[B, H, S, DK]`, S a multiple of `chunk_size * save_states_every`.
        v: values `[B, H, S, DV]`.
        i: input gates `[B, H, S]`.
        f: forget gates `[B, H, S]`.
        state: the state before the first token, or None.
        chunk_size: 16, 32, 64, 128 or 256.
        save_states_every: 1 to save the state before each chunk, 2 for the state before every second chunk, and so on.

    Returns:
        The saved states. Each tensor has an additional dimension after H, of size `S / (chunk_size * save_states_every)
        + 1`. Index j is the state before chunk `j * save_states_every`, and the last index is the final state.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value, or S is not a multiple of `chunk_size *
            save_states_every` (`mlstm` supports any length).

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 128, D) for D in (32, 32, 48))  # [B, H, S, D]
        >>> i, f = torch.randn(1, 2, 128), 3 + torch.randn(1, 2, 128)
        >>> tmm.xlstm.mlstm_states(k, v, i, f, chunk_size=64).C.shape
        torch.Size([1, 2, 3, 32, 48])
    """
    C0, n0, m0 = _initial("mlstm_states", state)
    C, n, m = _ops.mlstm_states(
        k, v, i, f, C0=C0, n0=n0, m0=m0, chunk_size=chunk_size, save_states_every=save_states_every
    )
    return MLSTMState(C, n, m)


def mlstm_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    states: MLSTMState,
    *,
    chunk_size: int,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the second half of `mlstm`, the outputs of all chunks at once. Not differentiable.

    Args:
        q: queries `[B, H, S, DK]`, S a multiple of `chunk_size`.
        k: keys `[B, H, S, DK]`.
        v: values `[B, H, S, DV]`.
        i: input gates `[B, H, S]`.
        f: forget gates `[B, H, S]`.
        states: the result of `mlstm_states`: the state before each chunk, and the final state.
        chunk_size: tokens between two of the states: 16, 32, 64, 128 or 256.
        eps: a number added to the denominator.

    Returns:
        `h [B, H, S, DV]` in the dtype of `q`; `N [B, H, S]`, the denominator without eps; and `M [B, H, S]`, the
        stabilizer of each token.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value, or S is not a multiple of `chunk_size`
            (`mlstm` supports any length).

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 128, D) for D in (32, 32, 48))  # [B, H, S, D]
        >>> i, f = torch.randn(1, 2, 128), 3 + torch.randn(1, 2, 128)
        >>> states = tmm.xlstm.mlstm_states(k, v, i, f, chunk_size=64)
        >>> h, N, M = tmm.xlstm.mlstm_output(q, k, v, i, f, states, chunk_size=64)
        >>> h.shape
        torch.Size([1, 2, 128, 48])
    """
    h, N, M = _ops.mlstm_output(
        q, k, v, i, f, *_tensors("mlstm_output", states, "states"), chunk_size=chunk_size, eps=eps
    )
    return h, N, M
