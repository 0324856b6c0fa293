"""Computes several projections of the same input in one call: q, k and v, or gate and up.

The model's code does not change. When a projection is called with a new input, all projections of its group are
computed. Later calls with the same input return parts of this result. The group is computed again if the input was
written in the meantime, or if gradients or autocast were switched on or off. The results are therefore correct for
every order of calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.joined_weights import joined
from torch_marlin_metal.layers.equivalence import check_module
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.layers.packed_layer import version_of
from torch_marlin_metal.layers.weight_info import WeightInfo
from torch_marlin_metal.packed_weight import PackedWeight

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(eq=False)
class _Group:
    """The shared data of a group's projections: the layer with all columns, the last input and its results."""

    layer: MarlinLinear
    sizes: list[int]
    scaled: list[bool]  # for each projection: True if its global scale had a value per column
    latest: tuple[Tensor, tuple[Any, ...], tuple[Tensor, ...]] | None = None


class FusedLinear(nn.Module):
    """One projection of a group. The first projection has the common layer as its submodule `fused`."""

    def __init__(self, group: _Group, index: int) -> None:
        super().__init__()
        if index == 0:
            self.fused = group.layer
        self._shared = (group,)  # a tuple, so that the group's layer does not become a submodule of each projection
        self._index = index
        self.in_features, self.out_features = group.layer.in_features, group.sizes[index]

    @property
    def group(self) -> _Group:
        """Returns the shared data of the group's projections."""
        return self._shared[0]

    @property
    def weight(self) -> WeightInfo:
        """Describes the columns of this projection, like `MarlinLinear.weight`."""
        whole = self.group.layer.weight
        return WeightInfo(whole.dtype, whole.device, torch.Size((self.out_features, self.in_features)))

    @property
    def bias(self) -> Tensor | None:
        """Returns this projection's part of the bias."""
        whole = self.group.layer.bias
        return None if whole is None else whole[self._columns]

    @property
    def _columns(self) -> slice:
        start = sum(self.group.sizes[: self._index])
        return slice(start, start + self.out_features)

    def forward(self, a: Tensor) -> Tensor:
        """Computes `[..., out_features]` for `a [..., in_features]`. The result is a view of the group's result."""
        group = self._shared[0]
        latest, state = group.latest, _state(a)
        known = latest is not None and latest[0] is a and latest[1] == state
        parts = latest[2] if known and latest is not None else group.layer(a).split(group.sizes, -1)
        group.latest = None if self._index == len(group.sizes) - 1 else (a, state, parts)
        return parts[self._index]

    def to_packed(self) -> PackedWeight:
        """Returns the weight and bias that this projection had before fusing."""
        group = self.group
        part = group.layer.to_packed().columns(self._columns)
        if part.global_scale is not None and not group.scaled[self._index]:
            part.global_scale = part.global_scale[:1].clone()
        return part

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, part={self._index}"


def _state(a: Tensor) -> tuple[Any, ...]:
    """Returns the state that a result depends on: the version of the tensor, gradients, and autocast."""
    if torch.compiler.is_compiling():  # a graph cannot test if a tensor was written
        return ()
    kind = a.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return version_of(a), a.requires_grad, torch.is_grad_enabled(), autocast


@dataclass(frozen=True)
class FusedReport:
    """The result of `fuse_projections`.

    Attributes:
        fused: the names of the projections in each fused group, one tuple per group.
        left: the groups that were not fused, each as (names, reason).
    """

    fused: list[tuple[str, ...]]
    left: list[tuple[tuple[str, ...], str]]


def fuse_projections(model: nn.Module, groups: Sequence[Sequence[str]] = GROUPS) -> FusedReport:
    """Computes the `MarlinLinear` projections of the same input in one call, in place.

    A group is fused if its weights have the same format, group size, dtypes and act-order. If the planner splits K of
    the joint matrix as it split K of the separate ones, the results have the same bits. Otherwise they agree within the
    operator's error bound. If an error occurs, no group is fused.

    A group frees its last input and results when its last projection is called. If a model never calls this projection,
    they stay in memory.

    Args:
        model: changed in place.
        groups: the names of sibling modules that share their input. If siblings have different inputs
            (cross-attention), the results are correct, but each projection is computed more than once.

    Raises:
        TypeError: `model` is not a module.

    Examples:
        >>> model = nn.Module()
        >>> for name in ("q_proj", "k_proj", "v_proj"):
        ...     model.add_module(name, tmm.MarlinLinear.from_linear(nn.Linear(64, 32)))
        >>> len(tmm.fuse_projections(model).fused)
        1
    """
    check_module("fuse_projections", model)
    report, ready = FusedReport([], []), []
    for prefix, parent in model.named_modules():
        for names in groups:
            layers = [parent._modules.get(name) for name in names]
            full = tuple(f"{prefix}.{name}" if prefix else name for name in names)
            packed = [layer for layer in layers if isinstance(layer, MarlinLinear)]
            if len(packed) != len(layers):
                if packed:
                    report.left.append((full, "not all of them are MarlinLinear"))
                continue
            if reason := _differences(packed):
                report.left.append((full, reason))
                continue
            group = _fuse(packed)
            ready.append(
                (parent, names, [FusedLinear(group, i).train(layer.training) for i, layer in enumerate(packed)])
            )
            report.fused.append(full)
    for parent, names, parts in ready:
        for name, part in zip(names, parts, strict=True):
            parent._modules[name] = part
    return report


def unfused(model: nn.Module) -> Iterator[tuple[str, PackedWeight]]:
    """Yields (name, weight) for each packed layer of a model. Fused projections are yielded as separate layers.

    Raises:
        ValueError: a layer has one process's part of a weight, which only `torch_marlin_metal.parallel` can read.
    """
    inside = set()
    for name, module in model.named_modules():
        if isinstance(module, FusedLinear):
            inside.add(f"{name}.fused")
            yield name, module.to_packed()
        elif isinstance(module, MarlinLinear) and name not in inside:
            if module.is_split:
                raise ValueError(
                    f"layer {name!r}: expected a whole weight, got one process' part of it ({type(module).__name__}): "
                    "save or decode the model before it is split"
                )
            yield name, module.to_packed()


def _differences(layers: list[MarlinLinear]) -> str:
    """Returns the reason why these layers cannot be fused, or ""."""
    first = layers[0]
    for layer in layers:
        if type(layer) is not MarlinLinear:
            return f"one is a {type(layer).__name__}"
        if (layer.in_features, layer.weight_format, layer.group_size) != (
            first.in_features,
            first.weight_format,
            first.group_size,
        ):
            return "their sizes, weight formats or group sizes differ"
        if layer.activations != first.activations:
            return "only some round activations"
        if (layer.rounds_weights, layer.rounds_in_training) != (first.rounds_weights, first.rounds_in_training):
            return "only some round weights"
        if (layer.bias is None) != (first.bias is None):
            return "only some have a bias"
        for name in ("scales", "zeros", "super_scales", "super_zeros", "bias"):
            mine, other = getattr(first, name), getattr(layer, name)
            if (mine is None) != (other is None) or (mine is not None and mine.dtype != other.dtype):
                return f"their {name} differ in dtype"
        for name in ("perm", "lut"):
            mine, other = getattr(first, name), getattr(layer, name)
            if (mine is None) != (other is None) or (mine is not None and not torch.equal(mine, other)):
                return "their act-orders differ" if name == "perm" else "their tables differ"
        if layer.b_packed.device != first.b_packed.device:
            return "they are on different devices"
        if layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__:
            return "one has hooks"
    return ""


def _fuse(layers: list[MarlinLinear]) -> _Group:
    weights = [layer.to_packed() for layer in layers]
    biases = [weight.bias.detach() for weight in weights if weight.bias is not None]
    scaled = [weight.global_scale is not None and weight.global_scale.numel() > 1 for weight in weights]
    whole = replace(joined(weights), bias=torch.cat(biases) if biases else None)
    layer = MarlinLinear.from_packed(whole, dtype=layers[0].dtype)
    for name in ("activations", "rounds_weights", "rounds_in_training"):
        setattr(layer, name, getattr(layers[0], name))
    return _Group(layer.train(layers[0].training), [weight.N for weight in weights], scaled)
