"""Checks that all processes have the same package, checkpoint and weights. Errors name the first difference."""

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.version import __version__

_TENSORS = {"b_packed": "packed words", "global_scale": "global scale"} | {
    name: name for name in ("scales", "zeros", "super_scales", "super_zeros", "lut", "perm", "b_high", "bias")
}


def number_of(text: str | bytes) -> int:
    """Returns a hash of a text as an integer. The hash is the same in every process."""
    data = text.encode() if isinstance(text, str) else text
    return int(hashlib.sha256(data).hexdigest()[:12], 16)


def gather(values: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Returns the values of all processes, in the order of ranks."""
    own = torch.tensor(values, dtype=torch.int64, device="cpu")
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group)
    return [other.tolist() for other in everyone]


def check_same(what: str, values: Mapping[str, int], group: dist.ProcessGroup) -> None:
    """Compares values between processes.

    If values differ, raises an error that names the first rank whose values differ from those of rank 0.

    Args:
        what: the operation and the values that must be equal, for the error message.
        values: name -> number. All processes have the same names.
        group: the processes. All of them must call this function.

    Raises:
        RuntimeError: a process has other values.
    """
    everyone = gather(list(values.values()), group)
    for rank, other in enumerate(everyone):
        different = [name for name, a, b in zip(values, everyone[0], other, strict=True) if a != b]
        if different:
            raise RuntimeError(
                f"{what} in every process, got another {' and '.join(different)} in rank {rank} of the group than in "
                "rank 0"
            )


def check_weight(op: str, weight: PackedWeight, group: dist.ProcessGroup) -> None:
    """Raises an error if a rank has another package version or weight than rank 0. The error names the first field."""
    values = {"version": number_of(__version__), "weight format": number_of(weight.weight_format)}
    values |= {"group size": weight.group_size, "K": weight.K, "N": weight.N}
    values |= {name: _digest(getattr(weight, field)) for field, name in _TENSORS.items()}
    check_same(f"{op}: expected the same package and weight", values, group)


def check_checkpoint(op: str, reader: CheckpointReader, group: dist.ProcessGroup) -> None:
    """Compares the package and the checkpoint between processes.

    For the checkpoint, `CheckpointReader.fingerprint` is compared. If values differ, raises an error that names the
    first rank whose package or checkpoint differs from that of rank 0.

    Args:
        op: the caller's name for the error message.
        reader: the checkpoint, see `convert.open_reader`.
        group: the processes. All of them must call this function.

    Raises:
        RuntimeError: a process has another package or checkpoint.
    """
    values = {"version": number_of(__version__), "checkpoint": number_of(reader.fingerprint())}
    check_same(f"{op}: expected the same package and checkpoint", values, group)


def _digest(tensor: Tensor | None) -> int:
    """Returns a checksum that also depends on the order of the columns."""
    if tensor is None:
        return -1
    held = tensor.detach().contiguous()
    rows = held.view(1, -1) if held.dim() < 2 else held.view(-1, held.shape[-1])
    columns = (rows.view(torch.uint8) if held.is_floating_point() else rows).sum(0, dtype=torch.int64)
    return int((columns * torch.arange(1, len(columns) + 1, device=columns.device)).sum())
