"""The mLSTM as modules: the cell of an xLSTM block, and the layer around the cell."""

import torch
from torch import Tensor, nn

from torch_marlin_metal.ops.mlstm import MLSTMState, mlstm, mlstm_step


def _run(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState | None, chunk_size: int, eps: float
) -> tuple[Tensor, MLSTMState]:
    if q.shape[2] != 1 or state is None:
        return mlstm(q, k, v, i, f, state, chunk_size=chunk_size, eps=eps)
    h, state = mlstm_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], i[:, :, 0], f[:, :, 0], state, eps=eps)
    return h.unsqueeze(2), state


class MLSTMCell(nn.Module):
    """The mLSTM cell, without parameters. It has the interface that xLSTM blocks of other packages call.

    It can replace `mlstm_backend` in the layers of `transformers`' xLSTM models:

        for module in model.modules():
            if hasattr(module, "mlstm_backend"):
                module.mlstm_backend = MLSTMCell()

    Unlike the original, this cell supports any length, returns the inputs' dtype and stores states in float32. It
    converts an initial state of another dtype to float32.

    Args:
        chunk_size: as in `mlstm`.
        eps: a number added to the denominator.

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 100, D) for D in (32, 32, 48))  # [B, H, S, D]
        >>> h, (C, n, m) = tmm.xlstm.MLSTMCell()(
        ...     q, k, v, torch.randn(1, 2, 100), torch.randn(1, 2, 100), return_last_states=True
        ... )
        >>> h.shape
        torch.Size([1, 2, 100, 48])
    """

    def __init__(self, chunk_size: int = 0, eps: float = 1e-6) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.eps = eps

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        igate: Tensor,
        fgate: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool = True,
        mode: str | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Runs the cell. For a single token with a state, it calls `mlstm_step`.

        Args:
            query: `[B, H, S, DK]`, not scaled.
            key: `[B, H, S, DK]`.
            value: `[B, H, S, DV]`.
            igate: `[B, H, S]`, before the exponential function.
            fgate: `[B, H, S]`, before the sigmoid function.
            c_initial: `[B, H, DK, DV]`. Pass all three initial tensors, or None for all.
            n_initial: `[B, H, DK]`.
            m_initial: `[B, H, 1]` or `[B, H]`.
            return_last_states: True to return the state too.
            mode: unused, because training and inference are the same in this cell.

        Returns:
            `[B, H, S, DV]`, or this result and the state (C, n, m) with m of shape `[B, H, 1]`.

        Raises:
            ValueError: one or two of the initial tensors are missing, or `mlstm` does not support an argument.
        """
        state = None
        initial = {"c_initial": c_initial, "n_initial": n_initial, "m_initial": m_initial}
        if c_initial is not None and n_initial is not None and m_initial is not None:
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            state = MLSTMState(c_initial.to(wide), n_initial.to(wide), m_initial.to(wide).reshape(m_initial.shape[:2]))
        elif given := [name for name, tensor in initial.items() if tensor is not None]:
            raise ValueError(
                f"MLSTMCell: {', '.join(initial)}: expected all three or none, got {', '.join(given)} only"
            )
        h, final = _run(query, key, value, igate, fgate, state, self.chunk_size, self.eps)
        return (h, (final.C, final.n, final.m.unsqueeze(-1))) if return_last_states else h

    def extra_repr(self) -> str:
        return f"chunk_size={self.chunk_size}, eps={self.eps}"


class MultiHeadLayerNorm(nn.Module):
    """Layer norm over each head of `[..., H, D]`, in float32, with a weight per element. Returns `[..., H * D]`."""

    def __init__(self, num_heads: int, head_dim: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))
        self.bias = nn.Parameter(torch.zeros(num_heads * head_dim)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normal = nn.functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype).flatten(-2)
        normal = normal * self.weight
        return normal if self.bias is None else normal + self.bias


class MLSTMLayer(nn.Module):
    """The mLSTM layer of an xLSTM block as in xLSTM 7B (Beck et al., arXiv:2503.13427): projections, cell, norm, gate.

    The state_dict has the names of xLSTM 7B's layers with separate weights (`q`, `k`, `v`, `ogate_preact`,
    `igate_preact`, `fgate_preact`, `multihead_norm`, `out_proj`). `quantize_model` turns the projections into
    `MarlinLinear`. Exclude the gate projections from quantization: they are small, and the exponential of the gates
    magnifies their errors.

    Args:
        d_model: size of the inputs and outputs.
        num_heads: H.
        qk_dim_factor: defines DK, which is `d_model * qk_dim_factor / num_heads`.
        v_dim_factor: defines DV, which is `d_model * v_dim_factor / num_heads`.
        gate_soft_cap: smooth bound for the magnitude of the gates. None means no bound.
        bias: True if the norm and the projections have a bias. The gate projections always have a bias.
        norm_eps: a number added to the variance in the norm.
        eps: a number added to the denominator in the cell.
        chunk_size: as in `mlstm`.

    Raises:
        ValueError: the sizes are not divisible by the number of heads.

    Examples:
        >>> layer = tmm.xlstm.MLSTMLayer(256, num_heads=4)
        >>> y, state = layer(torch.randn(1, 37, 256))  # a prompt, by chunks
        >>> y, state = layer(torch.randn(1, 1, 256), state)  # a token, by a step
        >>> y.shape
        torch.Size([1, 1, 256])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        qk_dim_factor: float = 0.5,
        v_dim_factor: float = 1.0,
        gate_soft_cap: float | None = 15.0,
        bias: bool = False,
        norm_eps: float = 1e-6,
        eps: float = 1e-6,
        chunk_size: int = 0,
    ) -> None:
        super().__init__()
        qk_dim, v_dim = int(d_model * qk_dim_factor), int(d_model * v_dim_factor)
        if qk_dim % num_heads or v_dim % num_heads or not qk_dim or not v_dim:
            raise ValueError(
                f"MLSTMLayer: num_heads: expected a divisor of the sizes of queries and values, {qk_dim} and {v_dim}, "
                f"got {num_heads}"
            )
        self.num_heads = num_heads
        self.gate_soft_cap = gate_soft_cap
        self.eps = eps
        self.chunk_size = chunk_size
        self.q = nn.Linear(d_model, qk_dim, bias=bias)
        self.k = nn.Linear(d_model, qk_dim, bias=bias)
        self.v = nn.Linear(d_model, v_dim, bias=bias)
        self.ogate_preact = nn.Linear(d_model, v_dim, bias=bias)
        self.igate_preact = nn.Linear(d_model, num_heads, bias=True)
        self.fgate_preact = nn.Linear(d_model, num_heads, bias=True)
        self.multihead_norm = MultiHeadLayerNorm(num_heads, v_dim // num_heads, norm_eps, bias)
        self.out_proj = nn.Linear(v_dim, d_model, bias=bias)
        # Initial biases of the gates. An untrained layer writes little to its state (the bias of i is -10) and forgets
        # little (the bias of f rises from 3 to 6 over the heads).
        with torch.no_grad():
            self.igate_preact.weight.zero_()
            self.igate_preact.bias.fill_(-10.0)
            self.fgate_preact.weight.zero_()
            self.fgate_preact.bias.copy_(torch.linspace(3.0, 6.0, num_heads, device=self.fgate_preact.bias.device))

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads).transpose(1, 2)

    def _gate(self, x: Tensor) -> Tensor:
        x = x.float()
        if self.gate_soft_cap is not None:
            x = self.gate_soft_cap * torch.tanh(x / self.gate_soft_cap)
        return x.transpose(1, 2)

    def forward(self, x: Tensor, state: MLSTMState | None = None) -> tuple[Tensor, MLSTMState]:
        """Runs the layer over S tokens. For a single token with a state, it calls `mlstm_step`.

        Args:
            x: `[B, S, d_model]`.
            state: the state after the previous tokens, or None.

        Returns:
            `[B, S, d_model]`, and the state after the last token.
        """
        q, k, v = (self._heads(projection(x)) for projection in (self.q, self.k, self.v))
        i, f = self._gate(self.igate_preact(x)), self._gate(self.fgate_preact(x))
        h, state = _run(q, k, v, i, f, state, self.chunk_size, self.eps)
        y = torch.sigmoid(self.ogate_preact(x)) * self.multihead_norm(h.transpose(1, 2))
        return self.out_proj(y), state
