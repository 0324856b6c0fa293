"""Reads 4-bit GPTQ and AWQ (gemm) modules on their device. Words that need no conversion are not copied."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.checkpoints.formats.gptq import SYMMETRIC_WORDS, VERSIONS
from torch_marlin_metal.checkpoints.grouped import fit_groups
from torch_marlin_metal.packed_weight import FLOAT_DTYPES, PackedWeight
from torch_marlin_metal.repack import gptq_perm

_ops = torch.ops.torch_marlin_metal


class UnreadableError(ValueError):
    """A module looks like a packed Linear but cannot be read. The message states the reason."""


@dataclass(frozen=True)
class _Tensors:
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None
    K: int
    N: int
    group_size: int


def shape_of(module: nn.Module) -> tuple[int, int] | None:
    """Returns `(N, K)` from the module's attributes, or None if it has no such attributes."""
    K, N = attribute(module, "in_features", "infeatures"), attribute(module, "out_features", "outfeatures")
    return (N, K) if isinstance(N, int) and isinstance(K, int) else None


def read_words(
    module: nn.Module, *, gptq_version: int | None, gptq_zeros_rule: str, config: dict[str, Any]
) -> PackedWeight | None:
    """Reads a module with `qweight` and `scales`. Returns None if it has one of AWQ's gemv layouts.

    The arguments are those of `detect.read_packed_linear`.

    Raises:
        UnreadableError: the layout is unknown, codes do not have 4 bits, or tensors contradict each other.
    """
    qweight, scales = module.qweight, module.scales
    assert isinstance(qweight, Tensor)
    assert isinstance(scales, Tensor)
    if (qweight.dtype == torch.int16 and qweight.dim() == 2) or "GEMV" in type(module).__name__:
        return None
    if qweight.dtype != torch.int32 or qweight.dim() != 2:
        raise UnreadableError(f"qweight is {qweight.dtype} {list(qweight.shape)}; expected int32 with two dimensions")
    if scales.dtype not in FLOAT_DTYPES or scales.dim() != 2:
        raise UnreadableError(f"scales are {scales.dtype} {list(scales.shape)}; expected fp16, bf16 or fp32 [G, N]")
    rows, columns, N = qweight.shape[0], qweight.shape[1], scales.shape[1]
    stated = shape_of(module) or (N, 8 * rows if columns == N else rows)
    # Shapes distinguish GPTQ, which packs along K, from AWQ, which packs along N.
    if (N, 8 * rows) == stated and columns == N:
        tensors = _gather(module, *stated)
        return _read_gptq(tensors, gptq_version or find_version(module, config, 4), gptq_zeros_rule)
    if (N, rows) == stated and 8 * columns == N:
        return _read_awq(_gather(module, *stated))
    if (rows, 8 * columns) == stated:
        return None
    raise UnreadableError(
        f"qweight {list(qweight.shape)} and scales {list(scales.shape)} fit neither GPTQ nor AWQ with 4 bits "
        f"for N={stated[0]}, K={stated[1]}"
    )


def _gather(module: nn.Module, N: int, K: int) -> _Tensors:
    qzeros, scales, g_idx = (tensor_of(module, name) for name in ("qzeros", "scales", "g_idx"))
    assert scales is not None
    if qzeros is None:
        raise UnreadableError("it has no qzeros")
    G = scales.shape[0]
    if qzeros.dtype != torch.int32 or 8 * qzeros.shape[-1] != N or list(qzeros.shape) != [G, N // 8]:
        raise UnreadableError(f"qzeros are {qzeros.dtype} {list(qzeros.shape)}; expected int32 [{G}, {N / 8:g}]")
    if g_idx is not None and g_idx.numel() == 0:
        g_idx = None
    stated = attribute(module, "group_size", "q_group_size")
    group_size = stated if stated is not None else -(-K // G)
    group_size = K if group_size == -1 else group_size
    if -(-K // group_size) != G or (stated is None and K % G):
        raise UnreadableError(f"{G} groups for K={K} do not agree with a group size of {group_size}")
    qweight = module.qweight
    assert isinstance(qweight, Tensor)
    return _Tensors(qweight.detach(), qzeros.detach(), scales.detach(), g_idx, K, N, group_size)


def _read_gptq(tensors: _Tensors, version: int, rule: str) -> PackedWeight:
    try:
        perm = None if tensors.g_idx is None else gptq_perm(tensors.g_idx, tensors.group_size)
    except ValueError as error:
        raise UnreadableError(str(error)) from error
    # Without act-order the words need no conversion, so the new layer uses them without a copy.
    b_packed = tensors.qweight.contiguous()
    if perm is not None:
        b_packed = _ops.gptq_repack(b_packed, perm=perm)
    zeros = _ops.gptq_unpack_zeros(tensors.qzeros.contiguous(), checkpoint_version=version, rule=rule)
    return _packed(b_packed, zeros, tensors, perm, f"gptq version {version}")


def _read_awq(tensors: _Tensors) -> PackedWeight:
    b_packed = _ops.awq_repack(tensors.qweight.contiguous())
    return _packed(b_packed, _ops.awq_unpack_zeros(tensors.qzeros.contiguous()), tensors, None, "awq gemm")


def _packed(b_packed: Tensor, zeros: Tensor, tensors: _Tensors, perm: Tensor | None, source: str) -> PackedWeight:
    symmetric = bool((zeros == 8).all())
    fitted = fit_groups(tensors.K, tensors.group_size, tensors.scales, zeros)
    if fitted is None:
        raise UnreadableError(f"no group size of the operators divides its groups of {tensors.group_size}")
    group_size, (scales, zeros) = fitted
    return PackedWeight(
        b_packed=b_packed,
        scales=scales.contiguous(),
        weight_format="uint4b8" if symmetric else "uint4",
        group_size=group_size,
        zeros=None if symmetric else zeros.contiguous(),
        perm=perm,
        source=source,
    )


def find_version(module: nn.Module, config: dict[str, Any], bits: int) -> int:
    """Returns the version of a module's zero points. Raises an error if only the other version makes them symmetric."""
    version, qzeros = _stated_version(module, config), tensor_of(module, "qzeros")
    other, middle = 3 - version, 1 << bits - 1
    if qzeros is not None and bits in SYMMETRIC_WORDS and bool((qzeros == SYMMETRIC_WORDS[bits][other]).all()):
        raise UnreadableError(
            f"every zero point is {middle + other - version} by version {version}, and {middle} by version {other}, "
            f"which makes the weight symmetric: if it is, gptq_version={other} reads it"
        )
    return version


def _stated_version(module: nn.Module, config: dict[str, Any]) -> int:
    """Returns the version that the module's class, the module or the config states, else 1.

    Some classes of GPTQModel require version 2. When such a class loads a file of version 1, it converts the zero
    points, so its modules always have version 2. Their `qzero_format()` is not reliable: it returns 2 if a file was
    converted, but 1 if the file already had version 2.
    """
    if getattr(type(module), "REQUIRES_FORMAT_V2", False):
        return 2
    stated = getattr(module, "qzero_format", None)
    if callable(stated) and stated() == 2:
        return 2
    layouts = (config.get("checkpoint_format"), config.get("format"))
    return 2 if any(VERSIONS.get(str(layout)) == 2 for layout in layouts) else 1


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """Returns the module's attribute if it is a tensor, else None."""
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def attribute(owner: Any, *names: str) -> Any:
    """Returns the first attribute that exists and is not None, or None. The owner may be None."""
    return next((value for name in names if (value := getattr(owner, name, None)) is not None), None)
