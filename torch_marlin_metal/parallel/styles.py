"""Styles of packed layers for `torch.distributed.tensor.parallel.parallelize_module`."""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.layers.packed_layer import WEIGHT_BUFFERS
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.parallel.split import split_columns, split_rows
from torch_marlin_metal.version import __version__

_TENSORS = {"b_packed": "packed words", "global_scale": "global scale"} | {
    name: name for name in ("scales", "zeros", "lut", "perm", "bias")
}
_SAME_ON_EVERY_RANK = ("version", "weight format", "group size", "K", "N", *_TENSORS.values())


class _SplitLinear(MarlinLinear):
    """A `MarlinLinear` that holds one process' part of a weight."""

    is_split = True
    _group: GroupName  # its name, because a group itself cannot be copied or pickled


class ColumnPart(_SplitLinear):
    """Computes this process' columns: `[..., K]` to `[..., N/count]`."""

    def forward(self, a: Tensor) -> Tensor:
        """Returns this process' columns for activations that every process has."""
        if isinstance(a, DTensor):
            a = a.redistribute(placements=[Replicate()]).to_local()
        return super().forward(_without_gradient("MarlinColwiseParallel", a))


class RowPart(_SplitLinear):
    """Computes the whole result from this process' features: `[..., K/count]` to `[..., N]`."""

    def forward(self, a: Tensor) -> Tensor:
        """Returns the sum over all processes, in fp32 and rounded once to a's dtype."""
        if isinstance(a, DTensor):
            a = a.redistribute(placements=[Shard(-1)]).to_local()
        a = _without_gradient("MarlinRowwiseParallel", a)
        kind = a.device.type
        if not torch.is_autocast_enabled(kind):
            return self._sum(a)
        a = a.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):  # or each product would be rounded before the sum
            return self._sum(a)

    def _sum(self, a: Tensor) -> Tensor:
        total: Tensor = collectives.all_reduce(super().forward(a.float()), "sum", self._group)
        return total.to(a.dtype)


class _MarlinParallel(ParallelStyle):
    """Replaces a layer's weight by this process' part."""

    kind: type[_SplitLinear]

    @abstractmethod
    def _part(self, weight: PackedWeight, count: int, rank: int) -> PackedWeight: ...

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = type(self).__name__
        if type(module) is not MarlinLinear:
            raise TypeError(f"{style}: expected a MarlinLinear that is not split, got {type(module).__name__}")
        if "forward" in module.__dict__:
            raise TypeError(
                f"{style}: expected a MarlinLinear with the forward of its class, got one with a forward of its own, "
                "such as accelerate's hooks set: load the model on one device, or remove them "
                "(accelerate.hooks.remove_hook_from_module)"
            )
        group = device_mesh.get_group()
        weight = module.to_packed()
        _check_every_rank_has(style, weight, group)
        part = self._part(weight, dist.get_world_size(group), dist.get_rank(group))
        layer = MarlinLinear.from_packed(part, dtype=module.dtype)
        for name in (*WEIGHT_BUFFERS, "packed_format"):
            module._buffers[name] = layer._buffers[name]
        module.bias = layer.bias
        module.in_features, module.out_features = layer.in_features, layer.out_features
        module.group_size = layer.group_size
        module.__class__ = self.kind
        object.__setattr__(module, "_group", group.group_name)
        return module


class MarlinColwiseParallel(_MarlinParallel):
    """Splits a `MarlinLinear` by N: every process computes some columns, bit for bit those of the whole layer.

    The input is the same on all processes, or a DTensor, which is replicated. The output is this process' part, a
    tensor `[..., N/count]`.

    Args:
        parts: for a layer that computes several projections, the columns of each: see `split_columns`.

    Raises:
        TypeError: the module is not a `MarlinLinear`, is split already, or has a forward of its own.
        ValueError: N does not divide by the number of processes.
        RuntimeError: the processes hold different weights or versions of this package. Also for activations that need
            a gradient.
    """

    kind = ColumnPart

    def __init__(self, *, parts: Sequence[int] | None = None) -> None:
        super().__init__()
        self.parts = parts

    def _part(self, weight: PackedWeight, count: int, rank: int) -> PackedWeight:
        return split_columns(weight, count, parts=self.parts)[rank]


class MarlinRowwiseParallel(_MarlinParallel):
    """Splits a `MarlinLinear` by K: every process multiplies some features, and the products are summed.

    The input is this process' part of the features, or a DTensor, which is cut along its last dimension. The output is
    the whole result on all processes. The products are in fp32 and rounded once after the sum, so that the error bound
    of one process holds. The sum's order is that of the process group, so runs with as many processes have the same
    bits.

    Args:
        gathered: for a weight with an act-order `perm` that moves features between parts: see `split_rows`.

    Raises:
        TypeError: the module is not a `MarlinLinear`, is split already, or has a forward of its own.
        ValueError: K does not divide at borders of groups.
        RuntimeError: the processes hold different weights or versions of this package. Also for activations that need
            a gradient.
    """

    kind = RowPart

    def __init__(self, *, gathered: bool = False) -> None:
        super().__init__()
        self.gathered = gathered

    def _part(self, weight: PackedWeight, count: int, rank: int) -> PackedWeight:
        return split_rows(weight, count, gathered=self.gathered)[rank]


def _without_gradient(style: str, a: Tensor) -> Tensor:
    if a.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{style}: a: expected activations without a gradient, got requires_grad=True")
    return a


def _digest(tensor: Tensor | None) -> int:
    """Returns a number that differs for most tensors, also for those that differ only in the order of columns."""
    if tensor is None:
        return -1
    held = tensor.detach().contiguous()
    rows = held.view(1, -1) if held.dim() < 2 else held
    columns = (rows.view(torch.uint8) if held.is_floating_point() else rows).sum(0, dtype=torch.int64)
    return int((columns * torch.arange(1, len(columns) + 1, device=columns.device)).sum())


def _check_every_rank_has(style: str, weight: PackedWeight, group: dist.ProcessGroup) -> None:
    """Raises an error that names the ranks whose package or weight is not rank 0's."""
    values = [
        *(int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) for name in (__version__, weight.weight_format)),
        *(weight.group_size, weight.K, weight.N),
        *(_digest(getattr(weight, name)) for name in _TENSORS),
    ]
    own = torch.tensor(values)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group)
    for rank, other in enumerate(everyone):
        same = (other == everyone[0]).tolist()
        if not all(same):
            different = [name for name, equal in zip(_SAME_ON_EVERY_RANK, same, strict=True) if not equal]
            raise RuntimeError(
                f"{style}: expected the same package and weight in every process, got another "
                f"{' and '.join(different)} in rank {rank} of the group than in rank 0"
            )
