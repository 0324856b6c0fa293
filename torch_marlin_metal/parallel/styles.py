"""Styles of packed layers for `torch.distributed.tensor.parallel.parallelize_module`."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.part import Part
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.layers.experts import ExpertWeights, MarlinExperts
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models.linear_layers import LinearShape, ModelMismatchError, fit_layer
from torch_marlin_metal.packed_weight import WEIGHT_TENSORS, PackedWeight
from torch_marlin_metal.parallel.agreement import check_weight, gather, number_of
from torch_marlin_metal.parallel.failures import naming_failed_ranks
from torch_marlin_metal.parallel.split import split_columns, split_rows

_TAG = 0x4D4D  # distinguishes exchanged sums from a program's own messages between two processes
# Up to these numbers of processes and of bytes per part, as in decoding, each process sends its part of a sum to all
# others. Beyond either limit, gloo's all_reduce is used, because it transfers fewer bytes.
_DIRECT_PROCESSES, _DIRECT_BYTES = 8, 64 << 10


class _SplitLinear(MarlinLinear):
    """A `MarlinLinear` with one process's part of a weight."""

    is_split = True
    _group: GroupName  # the name, because a group cannot be copied or pickled


class ColumnPart(_SplitLinear):
    """Computes this process's columns: `[..., K]` to `[..., N/count]`, or to `[..., N]` if the style gathers them."""

    _gathers: bool

    def forward(self, a: Tensor) -> Tensor:
        """Computes this process's columns. Every process has the same activations."""
        if isinstance(a, DTensor):
            a = a.redistribute(placements=[Replicate()]).to_local()
        own = super().forward(_without_gradient("MarlinColwiseParallel", a))
        if not self._gathers:
            return own
        return _together(
            "MarlinColwiseParallel", self._group, lambda: collectives.all_gather_tensor(own, own.dim() - 1, self._group)
        )


class RowPart(_SplitLinear):
    """Computes the complete result from this process's features: `[..., K/count]` to `[..., N]`."""

    product_dtype = torch.float32

    def forward(self, a: Tensor) -> Tensor:
        """Computes the sum over all processes in fp32, rounded once to a's dtype.

        Raises:
            RuntimeError: a process ended or hangs. The error names the process.
        """
        if isinstance(a, DTensor):
            a = a.redistribute(placements=[Shard(-1)]).to_local()
        a = _without_gradient("MarlinRowwiseParallel", a)
        kind = a.device.type
        if not torch.is_autocast_enabled(kind):
            return self._sum(a)
        a = a.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):  # autocast would round each product before the sum
            return self._sum(a)

    def _sum(self, a: Tensor) -> Tensor:
        return _sum("MarlinRowwiseParallel", self._group, self._sums(a)).to(a.dtype)


class ExpertPart(MarlinExperts):
    """Computes the complete result from this process's experts."""

    down_dtype = torch.float32
    is_split = True
    _group: GroupName
    _first: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the sum over all processes in fp32, rounded once; see `MarlinExperts.forward`.

        Raises:
            RuntimeError: a process ended or hangs. The error names the process.
        """
        ids = top_k_index - self._first  # ids of other processes' experts are outside the stack, and add nothing
        hidden = self.inner(_without_gradient("MarlinExpertParallel", hidden_states), ids)
        kind = hidden.device.type
        with torch.autocast(kind, enabled=False):  # autocast would round each product before the sum
            part = self.down(hidden.to(self.down_dtype), ids, top_k_weights, reduce=True)
        return _sum("MarlinExpertParallel", self._group, part).to(hidden.dtype)


class PackedStyle(ParallelStyle):
    """A style of packed layers."""

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...


class LinearStyle(PackedStyle):
    """Replaces a layer's weight by this process's part."""

    kind: ClassVar[type[_SplitLinear]]
    by: ClassVar[Literal["columns", "rows"]]

    @abstractmethod
    def _part(self, weight: PackedWeight, count: int, rank: int) -> PackedWeight: ...

    def _readable(self) -> bool:
        """Returns True if the part is a rectangle of the weight, so that the part can be read separately."""
        return True

    def _attributes(self, group: dist.ProcessGroup) -> dict[str, Any]:
        return {"_group": group.group_name}

    def _split(self, layer: MarlinLinear, group: dist.ProcessGroup) -> nn.Module:
        """Turns a `MarlinLinear` with this process's part into a layer that exchanges results with all processes."""
        layer.__class__ = self.kind
        vars(layer).update(self._attributes(group))
        return layer

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = type(self).__name__
        if type(module) is not MarlinLinear:
            raise TypeError(f"{style}: expected a MarlinLinear that is not split, got {type(module).__name__}")
        _check_forward(style, module)
        group = device_mesh.get_group()
        weight = module.to_packed()
        check_weight(style, weight, group)
        part = self._part(weight, dist.get_world_size(group), dist.get_rank(group))
        layer = MarlinLinear.from_packed(part, dtype=module.dtype)
        for name in (*WEIGHT_TENSORS, "packed_format"):
            module._buffers[name] = layer._buffers[name]
        module.bias = layer.bias
        module.in_features, module.out_features = layer.in_features, layer.out_features
        module.group_size = layer.group_size
        return self._split(module, group)

    def load(
        self,
        op: str,
        name: str,
        shape: LinearShape,
        reader: CheckpointReader,
        index: int,
        group: dist.ProcessGroup,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Makes this process's part of a layer, and reads only the part's bytes from the checkpoint.

        If the format has no `DirectoryFormat.axes`, or the part is not a rectangle of each tensor, the complete layer
        is read and then split.

        Args:
            op: the caller's name for error messages.
            name: the layer's name in the model.
            shape: the complete layer in the model.
            reader: the checkpoint, which must be the same in every process.
            index: the layer's index in the reader.
            group: the processes. All of them must call this function.
            device: see `fit_layer`.
            dtype: see `fit_layer`.

        Raises:
            ModelMismatchError: the sizes or biases of model and checkpoint differ.
            UnsupportedFormat: the layer cannot be packed.
            ValueError: the size of the layer is not divisible by the number of processes.
        """
        count, rank = dist.get_world_size(group), dist.get_rank(group)
        weight = reader.read_part(index, Part(self.by, count, rank)) if self._readable() else None
        # All parts must have the same format. A reader returns a format without zero points for a part whose zero
        # points are all 8, and another format for other parts. Then the complete layer is read and split.
        kinds = gather([-1 if weight is None else number_of(weight.weight_format)], group)
        if weight is None or any(kind != kinds[0] for kind in kinds):
            del weight  # frees the part before the complete layer is read
            weight = self._part(self._whole(op, name, shape, reader, index), count, rank)
        n, k = (count, 1) if self.by == "columns" else (1, count)
        _check_sizes(op, name, shape, weight.N * n, weight.K * k)
        own = replace(shape, N=weight.N, K=weight.K)
        if shape.bias is not None:
            own = replace(own, bias=shape.bias[: weight.N] if self.by == "columns" or rank == 0 else None)
        return self._split(fit_layer(op, name, own, weight, device=device, dtype=dtype), group)

    def _whole(self, op: str, name: str, shape: LinearShape, reader: CheckpointReader, index: int) -> PackedWeight:
        weight = reader.read(index)
        if not isinstance(weight, PackedWeight):
            reason = "it is left out" if weight is None else weight.reason
            raise UnsupportedFormat(f"{op}: layer {name!r}: {type(self).__name__} splits packed layers only: {reason}")
        _check_sizes(op, name, shape, weight.N, weight.K)
        return weight


def _check_sizes(op: str, name: str, shape: LinearShape, N: int, K: int) -> None:
    if (N, K) != (shape.N, shape.K):
        raise ModelMismatchError(
            f"{op}: layer {name!r}: expected a weight of [{shape.N}, {shape.K}] as in the model, the checkpoint's is "
            f"[{N}, {K}]"
        )


class MarlinColwiseParallel(LinearStyle):
    """Splits a `MarlinLinear` along N. Each process computes some of the columns, with the bits of the complete layer.

    The input is the same on all processes, or a DTensor, which is replicated. The output is this process's part, a
    tensor `[..., N/count]`.

    Args:
        parts: the columns of each projection, for a layer with several projections; see `split_columns`.
        gather: True to return the complete result `[..., N]` in every process, as needed for an output layer.

    Raises:
        TypeError: the module is not a `MarlinLinear`, is already split, or has another forward.
        ValueError: N is not divisible by the number of processes.
        RuntimeError: the processes have different weights or versions of this package, or the activations require a
            gradient.
    """

    kind = ColumnPart
    by = "columns"

    def __init__(self, *, parts: Sequence[int] | None = None, gather: bool = False) -> None:
        super().__init__()
        if parts is not None and gather:
            raise ValueError("MarlinColwiseParallel: gather: expected false for a layer of several parts, got true")
        self.parts, self.gather = parts, gather

    def _part(self, weight: PackedWeight, count: int, rank: int) -> PackedWeight:
        return split_columns(weight, count, parts=self.parts, only=rank)[0]

    def _readable(self) -> bool:
        return self.parts is None

    def _attributes(self, group: dist.ProcessGroup) -> dict[str, Any]:
        return super()._attributes(group) | {"_gathers": self.gather}


class MarlinRowwiseParallel(LinearStyle):
    """Splits a `MarlinLinear` along K. Each process multiplies some of the features, and the products are summed.

    The input is this process's part of the features, or a DTensor, which is split along its last dimension. The output
    is the complete result on all processes. The products are summed in fp32 and rounded once after the sum, so the
    error bound of a single process holds. The order of the sum is fixed: two runs with the same number of processes
    have the same bits, if both are compiled or both are not.

    Args:
        gathered: for a weight with an act-order `perm` that moves features between parts; see `split_rows`.

    Raises:
        TypeError: the module is not a `MarlinLinear`, is already split, or has another forward.
        ValueError: K cannot be split at borders of groups.
        RuntimeError: the processes have different weights or versions of this package, or the activations require a
            gradient.
    """

    kind = RowPart
    by = "rows"

    def __init__(self, *, gathered: bool = False) -> None:
        super().__init__()
        self.gathered = gathered

    def _part(self, weight: PackedWeight, count: int, rank: int) -> PackedWeight:
        return split_rows(weight, count, gathered=self.gathered, only=rank)[0]

    def _readable(self) -> bool:
        return not self.gathered


class MarlinExpertParallel(PackedStyle):
    """Splits `MarlinExperts` by experts. Each process computes the sum of its own experts, and all sums are added.

    Input and output are complete on all processes. The last product is in fp32 and is rounded once after the sum.

    Raises:
        TypeError: the module is not `MarlinExperts`, is already split, or has another forward.
        ValueError: the number of experts is not divisible by the number of processes.
        RuntimeError: the processes have different weights or versions of this package, or the activations require a
            gradient.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MarlinExperts) or type(module).forward is not MarlinExperts.forward:
            raise TypeError(
                "MarlinExpertParallel: expected MarlinExperts that take each token's experts and are not split, got "
                f"{type(module).__name__}"
            )
        _check_forward("MarlinExpertParallel", module)
        group = device_mesh.get_group()
        count, rank = dist.get_world_size(group), dist.get_rank(group)
        if module.num_experts % count:
            raise ValueError(
                f"MarlinExpertParallel: expected a number of processes that divides {module.num_experts} experts, got "
                f"{count}"
            )
        for stack in (module.gate_up, module.down):
            if not isinstance(stack, ExpertWeights):
                raise TypeError("MarlinExpertParallel: expected packed experts, got experts with a stack in floats")
            check_weight("MarlinExpertParallel", stack._stored(), group)
        share = module.num_experts // count
        own = slice(rank * share, (rank + 1) * share)
        module.gate_up, module.down = _experts(module.gate_up, own), _experts(module.down, own)
        module.__class__ = ExpertPart
        vars(module).update(_group=group.group_name, _first=own.start)
        return module


def _experts(stack: ExpertWeights, own: slice) -> ExpertWeights:
    part = ExpertWeights(
        own.stop - own.start,
        stack.in_features,
        stack.sizes,
        weight_format=stack.weight_format,
        group_size=stack.group_size,
        device="meta",
        dtype=stack.dtype,
    ).train(stack.training)
    part._buffers = {
        name: t if t is None or name in ("lut", "packed_format") else t[own].clone()
        for name, t in stack._buffers.items()
    }
    if stack.bias is not None:
        part.bias = nn.Parameter(stack.bias.detach()[own].clone(), requires_grad=False)
    return part


def _check_forward(style: str, module: nn.Module) -> None:
    if "forward" in module.__dict__:
        raise TypeError(
            f"{style}: expected a {type(module).__name__} with the forward of its class, got one with a forward of its "
            "own, such as accelerate's hooks set: load the model on one device, or remove them "
            "(accelerate.hooks.remove_hook_from_module)"
        )


def _together(style: str, group: GroupName, call: Callable[[], Tensor]) -> Tensor:
    """Runs a collective operation and waits for its result. Errors name the processes that failed."""
    if torch.compiler.is_compiling():
        return call()
    with naming_failed_ranks(style, torch._C._distributed_c10d._resolve_process_group(group)):
        result = call()
        return result.wait() if isinstance(result, collectives.AsyncCollectiveTensor) else result


def _sum(style: str, group: GroupName, part: Tensor) -> Tensor:
    """Computes the sum over all processes. All processes get the same bits."""
    if not torch.compiler.is_compiling() and part.device.type == "cpu":
        processes = torch._C._distributed_c10d._resolve_process_group(group)
        count = dist.get_world_size(processes)
        if count == 2 or (2 < count <= _DIRECT_PROCESSES and part.nbytes <= _DIRECT_BYTES):
            return _together(style, group, lambda: _exchanged(part, processes))
    return _together(style, group, lambda: collectives.all_reduce(part, "sum", group))


def _exchanged(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Adds the tensors of all processes in the order of ranks. Each process sends its tensor to all others.

    For 2048 floats, this takes a third to two thirds of the time of gloo's all_reduce, which has more sequential steps
    (docs/use/parallel.md).
    """
    rank, part = dist.get_rank(group), part.contiguous()
    peers = [peer for peer in range(dist.get_world_size(group)) if peer != rank]
    received = {peer: torch.empty_like(part) for peer in peers}
    waits = [dist.isend(part, group=group, group_dst=peer, tag=_TAG) for peer in peers]
    waits += [dist.irecv(received[peer], group=group, group_src=peer, tag=_TAG) for peer in peers]
    for wait in waits:
        assert wait is not None  # this process is a member of the group
        wait.wait()
    first, second, *others = (received.get(peer, part) for peer in range(len(peers) + 1))
    total = first + second
    for other in others:
        total += other
    return total


def _without_gradient(style: str, a: Tensor) -> Tensor:
    if a.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{style}: a: expected activations without a gradient, got requires_grad=True")
    return a
