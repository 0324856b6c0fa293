"""The experts of a mixture with packed weights. The host never waits for the device to learn which experts are used."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.joined_weights import with_same_scales
from torch_marlin_metal.layers.activation import Activation, KnownActivation, find_known
from torch_marlin_metal.layers.packed_layer import PackedLayer, options_of
from torch_marlin_metal.packed_weight import COLUMN_TENSORS, SCALE_BLOCK, PackedWeight, has_values

_moe_gemm = torch.ops.torch_marlin_metal.moe_gemm.default
_moe_gemm_gated = torch.ops.torch_marlin_metal.moe_gemm_gated.default


class StackError(ValueError):
    """The weights of experts cannot be stored in common tensors, for example because their formats differ.

    Attributes:
        reason: the reason, without the name of the caller.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"ExpertWeights: weights: {reason}")
        self.reason = reason


class ExpertWeights(PackedLayer):
    """The weights of one linear layer for all experts, in tensors with a leading dimension E.

    A weight may have several parts, for example gate and up, with adjacent columns. state_dict and dtypes are those of
    `MarlinLinear`. All experts share one `lut`.

    Args:
        experts: E, the number of experts.
        in_features: K, a multiple of 8.
        sizes: the number of columns of each part. N is the sum.
        bias: True if the layer has a bias `[E, N]`.
        **options: `weight_format`, `group_size`, `device`, `dtype` and all further arguments of `MarlinLinear`.

    Examples:
        >>> weights = [tmm.quantize_weight(torch.randn(96, 64), "uint4b8", 32) for _ in range(4)]
        >>> tmm.layers.ExpertWeights.from_packed([[weight] for weight in weights]).b_packed.shape
        torch.Size([4, 8, 96])
    """

    def __init__(
        self, experts: int, in_features: int, sizes: Sequence[int], bias: bool = False, **options: Any
    ) -> None:
        if experts < 1 or in_features < 8 or in_features % 8 or min(sizes, default=0) < 1:
            raise ValueError(
                "ExpertWeights: expected at least one expert, in_features a multiple of 8 and parts of at least one "
                f"column, got {experts}, {in_features} and {list(sizes)}"
            )
        super().__init__(in_features, sum(sizes), bias, stack=(experts,), **options)
        self.experts, self.in_features, self.sizes = experts, in_features, tuple(sizes)

    @property
    def place(self) -> torch.device:
        """Returns the device of the weights."""
        device: torch.device = self.b_packed.device
        return device

    @classmethod
    def from_packed(
        cls,
        weights: Iterable[Sequence[PackedWeight]],
        *,
        experts: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> "ExpertWeights":
        """Copies the weights of all experts into common tensors.

        Args:
            weights: the parts of each expert. An iterator may create them one expert at a time, because the function
                processes one expert at a time.
            experts: E. None means the length of `weights`. An iterator has no length, so it requires this argument.
            dtype: dtype of the bias. None means the default dtype.

        Raises:
            StackError: the weights cannot be stacked. The message states the first difference.
            PackedWeightError: a weight violates a rule of its format.
        """
        if not isinstance(weights, Iterable):
            raise StackError(f"expected a sequence with the parts of each expert, got {type(weights).__name__}")
        if experts is None:
            if not isinstance(weights, Sized):
                raise StackError(f"expected a sequence, or their number (experts); got a {type(weights).__name__}")
            experts = len(weights)
        if experts < 1:
            raise StackError(f"expected at least one expert, got {experts}")
        stack: ExpertWeights | None = None
        outlines: Sequence[PackedWeight] = []
        index = 0
        for parts in weights:  # enumerate would keep the last expert in memory while the iterator creates the next one
            if not isinstance(parts, Sequence) or any(not isinstance(part, PackedWeight) for part in parts):
                kinds = [type(part).__name__ for part in parts] if isinstance(parts, Sequence) else type(parts).__name__
                raise StackError(f"expected a list of PackedWeight for expert {index}, got {kinds}")
            if not parts:
                raise StackError(f"expected at least one part of expert {index}, got none")
            for part in parts:
                part.validate()
            outlines = outlines or [_outline(part) for part in parts]
            same = with_same_scales([*outlines, *parts])
            if stack is not None and same[0] is not outlines[0]:
                stack._expand_scales()
            outlines, parts = same[: len(outlines)], same[len(outlines) :]
            if reason := difference(outlines, parts):
                raise StackError(reason)
            stack = stack or cls._room_for(parts, experts, dtype)
            if index < experts:
                stack._fill(index, parts)
            index += 1
            del parts, part, same
        if stack is None or index != experts:
            raise StackError(f"expected {experts} experts, got {index}")
        stack._join_global_scales()
        return stack

    @classmethod
    def _room_for(cls, parts: Sequence[PackedWeight], experts: int, dtype: torch.dtype | None) -> "ExpertWeights":
        """Allocates an uninitialized stack for `experts` weights with the shapes of `parts`."""
        first, sizes = parts[0], [part.N for part in parts]
        options = options_of(first)
        options["global_scale_per_column"] |= len(parts) > 1
        return cls(
            experts, first.K, sizes, first.bias is not None, **options, device=first.b_packed.device, dtype=dtype
        )

    def _fill(self, index: int, parts: Sequence[PackedWeight]) -> None:
        """Copies the parts of one expert into the common tensors. Experts must be filled in order."""
        start = 0
        with torch.no_grad():
            for part, size in zip(parts, self.sizes, strict=True):
                for name in COLUMN_TENSORS:
                    own, given_tensor = getattr(self, name), getattr(part, name)
                    if own is not None and own.shape[-1] == 1 and name == "global_scale":
                        own[index] = 1.0 if given_tensor is None else given_tensor
                    elif own is not None:
                        unit = SCALE_BLOCK if name == "scales" and part.has_block_scales else 1
                        columns = slice(start // unit, (start + size) // unit)
                        own[index, ..., columns] = 1.0 if given_tensor is None else given_tensor
                start += size
            first = parts[0]
            if self.perm is None and first.perm is not None:
                self._add_perm()
            if self.perm is not None:
                self.perm[index] = self._in_order() if first.perm is None else first.perm
            if self.lut is not None and first.lut is not None:
                self.lut.copy_(first.lut)

    def _join_global_scales(self) -> None:
        """Reduces each expert's global scales to one if all parts have the same scale, as in a weight with one part."""
        scale = self.global_scale
        if scale is not None and len(self.sizes) > 1 and bool((scale == scale[:, :1]).all()):
            self.global_scale = scale[:, :1].clone()

    def _in_order(self) -> Tensor:
        return torch.arange(self.in_features, dtype=torch.int32, device=self.b_packed.device)

    def _expand_scales(self) -> None:
        """Gives each column its own scales, if a later expert has no scales of blocks but the first experts have."""
        self.scales = self.scales.repeat_interleave(SCALE_BLOCK, -1)

    def _add_perm(self) -> None:
        """Adds permutations that keep the order, if a later expert has a permutation but the first has none."""
        self.perm = self._in_order().repeat(self.experts, 1)
        for name in [name for name, tensor in self._buffers.items() if tensor is None]:
            self._buffers[name] = self._buffers.pop(name)  # absent buffers come last, as in PackedLayer

    def forward(
        self,
        a: Tensor,
        expert_ids: Tensor,
        row_weights: Tensor | None = None,
        reduce: bool = False,
        activation: KnownActivation | None = None,
    ) -> Tensor:
        """Computes `[T, top_k, N]`, or `[T, N]` with `reduce`, or `[T, top_k, N / 2]` with an activation.

        Args:
            a: activations `[T, K]` or `[T, top_k, K]`.
            expert_ids: the experts of each token, `[T, top_k]`.
            row_weights: factors `[T, top_k]` for the result's rows, or None.
            reduce: True to add up the rows of each token.
            activation: applied to the products. It cannot be combined with `row_weights` or `reduce`.

        Raises:
            ValueError: an argument is invalid, or an activation is combined with `row_weights` or `reduce`.
        """
        if activation is not None and (row_weights is not None or reduce):
            raise ValueError("ExpertWeights: activation: expected none with row_weights or reduce")
        tensors, named = self._arguments(self.bias)
        if activation is not None:
            gated: Tensor = _moe_gemm_gated(a, *tensors, expert_ids, **named, **activation.options())
            return gated
        if row_weights is not None:
            named["row_weights"] = row_weights
        result: Tensor = _moe_gemm(a, *tensors, expert_ids, reduce=reduce, **named)
        return result

    def to_packed(self, index: int, part: int | None = None, *, copy: bool = True) -> PackedWeight:
        """Returns the weight of one expert, or one part of this weight.

        Args:
            index: the index of the expert.
            part: the index of the part, or None for all columns.
            copy: True for contiguous copies of a part's tensors. False for strided views, which operators do not
                support but which suffice to read shapes and dtypes.

        Raises:
            IndexError: there is no such expert or part.
        """
        for argument, value, count in (("index", index, self.experts), ("part", part or 0, len(self.sizes))):
            if not 0 <= value < count:
                raise IndexError(f"ExpertWeights: to_packed: {argument}: expected 0 to {count - 1}, got {value}")
        whole = _expert(self._stored(), index)
        if part is None or len(self.sizes) == 1:
            return whole
        start = sum(self.sizes[:part])
        columns = slice(start, start + self.sizes[part])
        cut = whole.cut(columns)
        if copy:
            cut = {name: tensor.contiguous() for name, tensor in cut.items()}
        scale = cut.get("global_scale")
        if scale is not None and bool((scale == scale[0]).all()):
            cut["global_scale"] = scale[:1].clone()
        return replace(whole, **cut)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decodes the weights to floats `[E, N, K]`."""
        return torch.stack([self.to_packed(index).dequantize(dtype).T for index in range(self.experts)])

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, in_features={self.in_features}, sizes={list(self.sizes)}, "
            f"bias={self.bias is not None}, weight_format={self.weight_format}, group_size={self.group_size}"
        )

    def _weights(self, stored: PackedWeight) -> Iterator[PackedWeight]:
        return (_expert(stored, index) for index in range(self.experts))


class MarlinExperts(nn.Module):
    """The experts of a mixture: the product with gate and up, the activation, and the weighted product with down.

    No shape depends on the selected experts, and the host never waits, so a model with this layer compiles as one
    graph.

    Args:
        gate_up: the weights of gate and up, in one part or two. With a stack of `layers/mixed_experts.py`, the host may
            wait for the device.
        down: the weights of down, or a stack of `layers/mixed_experts.py`.
        activation: a function from the product `[T, top_k, 2 * I]` of `gate_up` to `[T, top_k, I]`. If
            `gated_activation` has the same results on random input, that operator replaces the function. If the
            function is a module, it becomes a child of this module. If it is a method of a module, that module must be
            elsewhere in the model.
        top_k: the number of experts per token, for which `prepare` compiles kernels. None means unknown.

    Examples:
        >>> from torch_marlin_metal.layers.experts import silu_gate
        >>> def pack(rows, columns):
        ...     return tmm.quantize_weight(torch.randn(rows, columns), "uint4b8", 32)
        >>> gate_up = tmm.layers.ExpertWeights.from_packed([[pack(96, 64), pack(96, 64)] for _ in range(4)])
        >>> down = tmm.layers.ExpertWeights.from_packed([[pack(64, 96)] for _ in range(4)])
        >>> experts = tmm.MarlinExperts(gate_up, down, silu_gate)
        >>> experts(torch.randn(3, 64), torch.tensor([[0, 3], [1, 0], [2, -1]]), torch.rand(3, 2)).shape
        torch.Size([3, 64])
    """

    down_dtype: torch.dtype | None = None  # dtype of the products with `down`; None means the activations' dtype

    def __init__(
        self,
        gate_up: Any,
        down: Any,
        activation: Activation,
        top_k: int | None = None,
    ) -> None:
        super().__init__()
        if gate_up.experts != down.experts:
            raise ValueError(
                f"MarlinExperts: down: expected {gate_up.experts} experts as in gate_up, got {down.experts}"
            )
        self.gate_up, self.down, self.top_k = gate_up, down, top_k
        self.activation = activation
        # An operator with the same results, or None.
        self._known = find_known(activation, sum(gate_up.sizes))
        if self._known is not None and sum(gate_up.sizes) != 2 * down.in_features:
            raise ValueError(
                f"MarlinExperts: down: expected in_features {sum(gate_up.sizes) // 2}, half the {sum(gate_up.sizes)} "
                f"columns of gate_up, got {down.in_features}"
            )

    @property
    def num_experts(self) -> int:
        """Returns the number of experts."""
        count: int = self.gate_up.experts
        return count

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns `[T, H]`, the weighted sum over the experts of each token.

        Args:
            hidden_states: `[T, H]`.
            top_k_index: the experts of each token, `[T, top_k]`. An id outside `[0, E)` adds nothing.
            top_k_weights: the weights of these experts, `[T, top_k]`.

        Raises:
            ValueError: an argument has the wrong shape, dtype or device, or the activation's result does not fit
                `down`.
        """
        if hidden_states.dim() != 2:
            raise ValueError(
                f"MarlinExperts: hidden_states: expected [T, H] with H = {self.gate_up.in_features}, got "
                f"{list(hidden_states.shape)}"
            )
        inner = self.inner(hidden_states, top_k_index)
        if inner.shape[-1] != self.down.in_features:
            raise ValueError(
                f"MarlinExperts: activation: expected [..., {self.down.in_features}] of {sum(self.gate_up.sizes)} "
                f"columns of gate_up, as down takes it, got {list(inner.shape)}"
            )
        return self.down(inner, top_k_index, top_k_weights, reduce=True)  # type: ignore[no-any-return]

    def inner(self, hidden_states: Tensor, top_k_index: Tensor) -> Tensor:
        """Computes the product with gate and up and the activation: `[T, top_k, I]`."""
        if self._known is not None and not self._known.swapped and isinstance(self.gate_up, ExpertWeights):
            return self.gate_up(hidden_states, top_k_index, activation=self._known)  # type: ignore[no-any-return]
        return self.activate(self.gate_up(hidden_states, top_k_index))

    def activate(self, gate_up: Tensor) -> Tensor:
        """Applies the activation to the output `[..., 2 * I]` of `gate_up`. Returns `[..., I]`."""
        return (self._known or self.activation)(gate_up)


def silu_gate(gate_up: Tensor) -> Tensor:
    """Computes `silu(gate) * up`, the activation of Mixtral, Qwen and OLMoE. `gate_up` contains gate, then up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def difference(mine: Sequence[PackedWeight], other: Sequence[PackedWeight]) -> str:
    """Returns the reason why the weights of two experts cannot be stored in common tensors, or ""."""
    if [part.N for part in mine] != [part.N for part in other]:
        return "the sizes of the experts differ"
    first = mine[0]
    for part in (*mine, *other):
        if (part.K, part.weight_format, part.group_size) != (first.K, first.weight_format, first.group_size):
            return "sizes, weight formats or group sizes differ"
        for name in ("scales", "zeros", "super_scales", "super_zeros", "bias"):
            a, b = getattr(first, name), getattr(part, name)
            if (a is None) != (b is None) or (a is not None and a.dtype != b.dtype):
                return f"the dtypes of {name} differ"
        luts = first.lut, part.lut
        if luts[0] is not None and (luts[1] is None or (has_values(luts[0]) and not torch.equal(luts[0], luts[1]))):
            return "tables differ"
        if part.b_packed.device != first.b_packed.device:
            return "devices differ"
    for parts in (mine, other):
        for part in parts[1:]:
            a, b = parts[0].perm, part.perm
            if (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b)):
                return "the act-orders of gate and up differ"
    if len(mine) == 1 and _per_column(mine[0]) != _per_column(other[0]):
        return "some global scales have a value per column"
    return ""


def _expert(stack: PackedWeight, index: int) -> PackedWeight:
    own: dict[str, Any] = {name: tensor[index] for name, tensor in stack.tensors().items() if name != "lut"}
    return replace(stack, **own)


def _outline(part: PackedWeight) -> PackedWeight:
    """Returns a weight with the sizes, dtypes and table of `part` that uses almost no memory."""
    tensors = {name: tensor for name, tensor in part.tensors().items() if name not in ("lut", "perm")}
    hollow: dict[str, Any] = {name: tensor.new_empty(()).expand(tensor.shape) for name, tensor in tensors.items()}
    return replace(part, perm=None, **hollow)


def _per_column(part: PackedWeight) -> bool:
    return part.global_scale is not None and part.global_scale.numel() > 1
