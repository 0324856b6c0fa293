"""Weights of experts that cannot be one packed stack: float weights, or separate stacks for gate and up."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_marlin_metal.layers.experts import ExpertWeights

FEW_ROWS = 32  # up to this many rows, each row's weight is copied, and one batched product computes all rows


class FloatExpertWeights(nn.Module):
    """The weights of one linear layer for all experts, in floats.

    With more than `FEW_ROWS` rows, the host waits once for the device, to read the number of rows of each expert.

    Args:
        weight: the weights `[E, N, K]`.
        bias: the biases `[E, N]`, or None.
        sizes: the number of columns of each part, for example gate and up. N is the sum.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.experts, _, self.in_features = weight.shape
        self.sizes = tuple(sizes)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def place(self) -> torch.device:
        return self.weight.device

    def forward(self, a: Tensor, expert_ids: Tensor, row_weights: Tensor | None = None, reduce: bool = False) -> Tensor:
        """Computes `ExpertWeights.forward` without an activation."""
        T, top_k = expert_ids.shape
        rows = (a.unsqueeze(1).expand(-1, top_k, -1) if a.dim() == 2 else a).reshape(T * top_k, -1)
        ids = expert_ids.reshape(-1).long()
        known = (ids >= 0) & (ids < self.experts)
        ids = torch.where(known, ids, 0)
        y = self._product(rows.to(self.weight.dtype), ids)
        if self.bias is not None:
            y = y + self.bias[ids]
        y = torch.where(known.unsqueeze(1), y, 0).view(T, top_k, -1).float()
        if row_weights is not None:
            y = y * row_weights.unsqueeze(-1).float()
        return (y.sum(1) if reduce else y).to(a.dtype)

    def _product(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Multiplies each row `[R, K]` by its expert's weight. Returns `[R, N]`."""
        if len(rows) <= FEW_ROWS or torch.compiler.is_compiling():
            return torch.bmm(self.weight[ids], rows.unsqueeze(2)).squeeze(2)
        order = ids.argsort()
        counts = torch.bincount(ids, minlength=self.experts).tolist()
        products = [
            part @ self.weight[expert].T for expert, part in enumerate(torch.split(rows[order], counts)) if len(part)
        ]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return torch.cat(products)[back]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight.detach().to(dtype)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, in_features={self.in_features}, sizes={list(self.sizes)}, dtype={self.dtype}"


Stack = ExpertWeights | FloatExpertWeights


class JoinedExpertWeights(nn.Module):
    """Gate and up of all experts in two stacks. One of the stacks may be in floats.

    Args:
        gate: the stack with the weights of gate.
        up: the stack with the weights of up, in the same shape as gate.
        alternates: True if gate and up columns alternate, False if they are two halves.
    """

    def __init__(self, gate: Stack, up: Stack, alternates: bool) -> None:
        super().__init__()
        self.gate, self.up, self.alternates = gate, up, alternates
        self.experts, self.in_features, self.sizes = gate.experts, gate.in_features, (*gate.sizes, *up.sizes)

    @property
    def parts(self) -> tuple[Stack, Stack]:
        return self.gate, self.up

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the biases and of a float stack."""
        return next((part.dtype for part in self.parts if isinstance(part, FloatExpertWeights)), self.gate.dtype)

    @property
    def place(self) -> torch.device:
        return self.gate.place

    @property
    def bias(self) -> Tensor | None:
        """Returns the biases `[E, N]`, or None."""
        biases = [part.bias for part in self.parts if part.bias is not None]
        return self._join(biases) if biases else None

    def forward(self, a: Tensor, expert_ids: Tensor) -> Tensor:
        """Computes `[T, top_k, N]`. The arguments are those of `ExpertWeights.forward`."""
        return self._join([part(a, expert_ids) for part in self.parts])

    def _join(self, columns: Sequence[Tensor]) -> Tensor:
        if self.alternates:
            return torch.stack(tuple(columns), dim=-1).flatten(-2)
        return torch.cat(tuple(columns), dim=-1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decodes the weights to floats `[E, N, K]`."""
        return self._join([part.dequantize(dtype).mT for part in self.parts]).mT.contiguous()
