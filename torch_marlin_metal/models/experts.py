"""Packs the experts of a mixture, which transformers stores as stacked parameters (see `layers/float_experts.py`)."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torch_marlin_metal.checkpoints.reader import DenseWeight
from torch_marlin_metal.layers.activation import Activation
from torch_marlin_metal.layers.common_format import stack_exactly
from torch_marlin_metal.layers.experts import ExpertWeights, MarlinExperts, StackError, difference
from torch_marlin_metal.layers.experts_equivalence import why_unknown
from torch_marlin_metal.layers.float_experts import WEIGHTS, apply_gate, stores_transposed, takes_each_token
from torch_marlin_metal.layers.mixed_experts import FloatExpertWeights, JoinedExpertWeights
from torch_marlin_metal.models.linear_layers import LinearShape
from torch_marlin_metal.packed_weight import COLUMN_TENSORS, FLOAT_DTYPES, PackedWeight


def why_never_experts(module: nn.Module) -> str:
    """Returns the reason why experts can never be packed, independent of their values, or ""."""
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    for name, tensor in module._parameters.items():
        if tensor is not None and type(tensor) is not nn.Parameter:
            return f"{name} is a {type(tensor).__name__}"
    for name in WEIGHTS:
        K = shape_of(module, name).K
        if K % 8 or not module._parameters[name].numel():  # type: ignore[union-attr]
            return f"K = {K} of {name} is not a positive multiple of 8"
    return why_unknown(module)


def why_not_experts(module: nn.Module) -> str:
    """Returns the reason why float experts cannot be packed, or ""."""
    if reason := why_never_experts(module):
        return reason
    for name, tensor in module._parameters.items():
        if tensor is None:
            continue
        if tensor.is_meta:
            return f"{name} is on the meta device"
        if tensor.dtype not in FLOAT_DTYPES:
            return f"{name} is {tensor.dtype}; expected float16, bfloat16 or float32"
        if not all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor.detach())):
            return f"{name} is not finite"
    return ""


def shape_of(experts: nn.Module, name: str) -> LinearShape:
    """Returns the shape of one expert's layer in a stacked parameter, `gate_up_proj` or `down_proj`."""
    weight, bias = experts._parameters[name], experts._parameters.get(f"{name}_bias")
    assert weight is not None
    _, N, K = weight.mT.shape if stores_transposed(experts) else weight.shape
    return LinearShape(N, K, weight.dtype, weight.device, None if bias is None else bias[0])


class Gate:
    """The activation of an experts module, as a callable that can be pickled.

    The module's bound method cannot be pickled: pickle looks up a bound method by the name of its function, but
    transformers' decorator adds a function with another name.
    """

    def __init__(self, module: Any) -> None:
        self.__self__ = module

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Computes the activation `[..., I]` of gate and up `[..., 2 * I]`."""
        return apply_gate(self.__self__, gate_up)


@dataclass(frozen=True)
class ExpertLayers:
    """The layers of an experts module: their names in a checkpoint, and their shapes.

    Attributes:
        gate_module: a copy of the experts module without parameters, used for its activation.
        count: the number of experts.
        parts: the names of the gate, up and down layers, or () if gate and up are one layer.
        shapes: the shapes of one expert's `gate_up_proj` and `down_proj`.
        why_unknown: the reason why `MarlinExperts` cannot replace the module, or "".
        alternates: True if gate and up columns alternate in `gate_up_proj` but are separate layers in `parts`.
    """

    gate_module: Any
    count: int
    parts: tuple[str, ...]
    shapes: tuple[LinearShape, LinearShape]
    why_unknown: str
    alternates: bool = False

    @classmethod
    def of(cls, experts: nn.Module, parts: tuple[str, ...] = ()) -> "ExpertLayers":
        """Describes the layers of an experts module. Does not change the module or keep a reference to it."""
        gate_module: Any = copy.copy(experts)
        gate_module._parameters = {}
        gate_module.is_transposed = stores_transposed(experts)  # cannot be derived without the parameters
        shapes = shape_of(experts, WEIGHTS[0]), shape_of(experts, WEIGHTS[1])
        # Without meta tensors, the slices of the biases would keep the parameters in memory.
        gate_up, down = (
            replace(shape, bias=None if shape.bias is None else torch.empty_like(shape.bias, device="meta"))
            for shape in shapes
        )
        count = len(experts._parameters["down_proj"])  # type: ignore[arg-type]
        alternates = bool(parts) and not getattr(experts, "is_concatenated", True)
        return cls(gate_module, count, parts, (gate_up, down), why_unknown(experts), alternates)

    def names(self, index: int) -> tuple[list[str], list[str]]:
        """Returns the names of one expert's layers within the module: ([gate, up] or [gate_up], [down])."""
        if not self.parts:
            return [f"gate_up_proj.{index}"], [f"down_proj.{index}"]
        gate, up, down = self.parts
        return [f"{index}.{gate}", f"{index}.{up}"], [f"{index}.{down}"]

    def all_names(self) -> Iterator[tuple[str, LinearShape]]:
        """Yields (name, shape) for each layer of each expert."""
        gate_up, down = self.shapes
        if self.parts:
            bias = None if gate_up.bias is None else gate_up.bias[: gate_up.N // 2]
            gate_up = replace(gate_up, N=gate_up.N // 2, bias=bias)
        for index in range(self.count):
            for names, shape in zip(self.names(index), (gate_up, down), strict=True):
                yield from ((name, shape) for name in names)

    def join(self, number: int, columns: Sequence[Tensor]) -> Tensor:
        """Joins the parts of gate and up (`number` 0) or of down (1) along the last dimension."""
        if self.alternates and number == 0:
            return torch.stack(tuple(columns), dim=-1).flatten(-2)
        return torch.cat(tuple(columns), dim=-1) if len(columns) > 1 else columns[0]

    @property
    def gate(self) -> Activation:
        """Returns the model's activation, a function from gate and up `[..., 2 * I]` to `[..., I]`."""
        return Gate(self.gate_module)

    def stack(self, number: int, weights: Iterable[Sequence[PackedWeight]]) -> ExpertWeights:
        """Makes the stack of gate and up (`number` 0) or of down (1). `weights` has the parts of each expert."""
        own = self.shapes[number].dtype
        return ExpertWeights.from_packed(weights, experts=self.count, dtype=own if own in FLOAT_DTYPES else None)

    def pack(
        self,
        read: Callable[[str, bool], PackedWeight | DenseWeight],
        dtype: torch.dtype | None = None,
        floats: Callable[[str, str, str, int], None] = lambda reason, name, kind, held: None,
    ) -> "NamedExperts":
        """Makes the stacks of all experts, reading one expert at a time. Packs each stack for which this is possible.

        Args:
            read: returns the weight of the layer with the given name. The second argument is True if the layer is
                decoded to floats. If it is False, the function may raise StackError for a layer that the caller wants
                in floats.
            dtype: dtype of the biases and of a float stack. None means their dtype in the model.
            floats: called for each layer that is decoded to floats, with the reason, the layer's name, its
                `DenseWeight.kind` ("" for a packed layer), and its bytes.

        Raises:
            StackError: the model computes something else with its experts than `MarlinExperts` does.
        """
        if self.why_unknown:
            raise StackError(self.why_unknown)
        stacks = [self._stack(number, read, dtype, floats) for number in range(len(WEIGHTS))]
        joined = self.alternates and not isinstance(stacks[0], JoinedExpertWeights)
        return (replace(self, parts=(), alternates=False) if joined else self).module(*stacks)

    def module(self, gate_up: Any, down: Any) -> "NamedExperts":
        """Makes the experts module from its stacks."""
        kind = ExpertsOfEachToken if takes_each_token(self.gate_module) else NamedExperts
        return kind(self, gate_up, down)

    def _stack(self, number: int, read: Any, dtype: torch.dtype | None, floats: Any) -> Any:
        own = self.shapes[number].dtype
        kept = dtype or (own if own in FLOAT_DTYPES else None)
        names = [self.names(index)[number] for index in range(self.count)]
        reasons: list[str] = []

        def packed(part: int | None) -> ExpertWeights | None:
            def parts(layers: Sequence[str]) -> Sequence[PackedWeight]:
                found = [self._packed(read, name) for name in (layers if part is None else [layers[part]])]
                return [self._alternated(found)] if self.alternates and len(found) > 1 else found

            try:
                return stack_exactly(lambda: map(parts, names), self.count, kept)
            except StackError as error:
                reasons.append(error.reason)
                return None

        whole = packed(None)
        if whole is not None:
            return whole
        apart = [packed(part) for part in range(len(names[0]))] if len(names[0]) > 1 else [None]
        if not any(apart):
            return self._floats(number, names, read, kept, partial(floats, reasons[0]))
        made = [
            self._floats(number, [[layers[part]] for layers in names], read, kept, partial(floats, reasons[-1]))
            if stack is None
            else stack
            for part, stack in enumerate(apart)
        ]
        return JoinedExpertWeights(made[0], made[1], self.alternates)

    def _packed(self, read: Any, name: str) -> PackedWeight:
        weight = read(name, False)
        if not isinstance(weight, PackedWeight):
            raise StackError(f"{name}: {weight.reason}")
        return weight

    def _floats(
        self, number: int, names: Sequence[Sequence[str]], read: Any, dtype: torch.dtype | None, floats: Any
    ) -> FloatExpertWeights:
        values: Tensor | None = None
        biases: Tensor | None = None
        sizes: list[int] = []
        for index, layers in enumerate(names):
            found = [read(layer, True) for layer in layers]
            kind = dtype or self.shapes[number].dtype
            columns = [weight.dequantize(kind) for weight in found]
            whole = self.join(number, columns) if len(columns) > 1 else columns[0]
            given = [weight.bias for weight in found if weight.bias is not None]
            if values is None:
                sizes = [part.shape[1] for part in columns]
                values = whole.new_empty(self.count, whole.shape[1], whole.shape[0])
                biases = whole.new_empty(self.count, whole.shape[1]) if given else None
            values[index] = whole.T
            if biases is not None:
                biases[index] = self.join(number, given) if len(given) > 1 else given[0]
            for layer, weight, part in zip(layers, found, columns, strict=True):
                floats(layer, getattr(weight, "kind", ""), part.nbytes)
            del found, columns, whole, given, weight, part  # only one expert's weights exist in addition to the stack
        assert values is not None
        return FloatExpertWeights(values, biases, sizes if not self.alternates else [sum(sizes)])

    def _alternated(self, parts: Sequence[PackedWeight]) -> PackedWeight:
        """Makes one weight with alternating gate and up columns."""
        parts = [part.expanded_scales() for part in parts]  # interleaved columns are not blocks
        if reason := difference(parts[:1], parts[1:]):
            raise StackError(reason)
        first, second = (part.tensors() for part in parts)
        columns = [name for name in COLUMN_TENSORS if name in first and name != "global_scale"]
        joined: dict[str, Any] = {name: self.join(0, (first[name], second[name])) for name in columns}
        if any("global_scale" in held for held in (first, second)):
            one = torch.ones(1, device=parts[0].b_packed.device)
            scales = [held.get("global_scale", one).expand(parts[0].N) for held in (first, second)]
            joined["global_scale"] = self.join(0, scales)
        return replace(parts[0], **joined)


class NamedExperts(MarlinExperts):
    """A `MarlinExperts` that replaces a model's experts module and knows its layers' names in checkpoints."""

    def __init__(self, layers: ExpertLayers, gate_up: Any, down: Any) -> None:
        top_k = getattr(getattr(layers.gate_module, "config", None), "num_experts_per_tok", None)
        super().__init__(gate_up, down, layers.gate, top_k)
        self._layers = layers

    def _named(self, index: int) -> Iterator[tuple[str, Any, int]]:
        """Yields (name in this module, stack, part of the stack) for each layer of an expert."""
        for stack, names in zip((self.gate_up, self.down), self._layers.names(index), strict=True):
            for part, name in enumerate(names):
                apart = isinstance(stack, JoinedExpertWeights)
                yield name, stack.parts[part] if apart else stack, 0 if apart else part

    def named_layers(self, *, copy: bool = True) -> Iterator[tuple[str, PackedWeight]]:
        """Yields (name in this module, weight) for each packed layer; `copy` as in `to_packed`."""
        for index in range(self.num_experts):
            for name, stack, part in self._named(index):
                if isinstance(stack, ExpertWeights):
                    yield name, stack.to_packed(index, part, copy=copy)

    def named_floats(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name in this module, values) for each floating-point weight and bias."""
        for index in range(self.num_experts):
            for name, stack, part in self._named(index):
                if isinstance(stack, FloatExpertWeights):
                    start = sum(stack.sizes[:part])
                    columns = slice(start, start + stack.sizes[part])
                    yield f"{name}.weight", stack.weight.detach()[index, columns].clone()
                    if stack.bias is not None:
                        yield f"{name}.bias", stack.bias.detach()[index, columns].clone()

    def to_floats(self, dtype: torch.dtype) -> nn.Module:
        """Makes the model's own experts module with the decoded weights."""
        experts: Any = copy.copy(self._layers.gate_module)
        experts._parameters = {}
        for name, stack in zip(WEIGHTS, (self.gate_up, self.down), strict=True):
            weight = stack.dequantize(dtype)
            if stores_transposed(experts):
                weight = weight.mT.contiguous()
            experts.register_parameter(name, nn.Parameter(weight))
            if stack.bias is not None:
                experts.register_parameter(f"{name}_bias", nn.Parameter(stack.bias.detach().to(dtype)))
        return experts  # type: ignore[no-any-return]


class ExpertsOfEachToken(NamedExperts):
    """Experts that all receive all tokens, like those of Llama 4. The forward makes the host wait for the device."""

    def __init__(self, layers: ExpertLayers, gate_up: Any, down: Any) -> None:
        super().__init__(layers, gate_up, down)
        self.top_k = 1

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Computes `[E * T, H]` from `hidden_states [E * T, H]`, which has a row of each token for each expert.

        The rows of tokens that an expert does not receive are zero.

        Raises:
            ValueError: `hidden_states` has another number of dimensions, or its row count is not divisible by E.
        """
        if hidden_states.dim() != 2 or len(hidden_states) % self.num_experts:
            raise ValueError(
                f"{type(self).__name__}: hidden_states: expected [E * T, H] with all tokens for each of "
                f"E = {self.num_experts} experts, got {list(hidden_states.shape)}"
            )
        rows = hidden_states.ne(0).any(-1).nonzero()  # the result of a row of zeros is known to be zeros
        experts = rows // (len(hidden_states) // self.num_experts)
        weights = hidden_states.new_ones(experts.shape)
        computed = super().forward(hidden_states[rows[:, 0]], experts, weights)
        return torch.zeros_like(hidden_states).index_copy(0, rows[:, 0], computed)


def pack_experts(experts: nn.Module, quantize: Callable[[str, Tensor], PackedWeight]) -> NamedExperts:
    """Packs float experts, one at a time.

    Args:
        experts: a module for which `is_experts` is True and `why_not_experts` is "". It is not changed.
        quantize: packs the weight `[N, K]` of the layer with the given name.
    """
    layers = ExpertLayers.of(experts)

    def packed(name: str, floats: bool) -> PackedWeight:
        kind, index = name.split(".")
        stack, bias = experts._parameters[kind], experts._parameters.get(f"{kind}_bias")
        assert stack is not None
        weight = stack.detach()[int(index)]
        weight = weight.T.contiguous() if stores_transposed(experts) else weight
        return replace(quantize(name, weight), bias=None if bias is None else bias.detach()[int(index)])

    return layers.pack(packed)
