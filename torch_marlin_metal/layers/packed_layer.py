"""The base class of layers with packed weights: their tensors, dtypes and state_dict."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torch_marlin_metal.formats import WEIGHT_FORMATS, resolve_group_size
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.huge_pages import prefer_huge_pages
from torch_marlin_metal.packed_weight import (
    SCALE_BLOCK,
    SUPER_BLOCK,
    WEIGHT_TENSORS,
    PackedWeight,
    PackedWeightError,
    operator_arguments,
)

FORMAT_VERSION = 1
# The name of a float layer's weight. A packed layer's state_dict has a tensor of one element with this name. If a float
# layer loads this state_dict by mistake, the loader reports a wrong size. Without the tensor, a loader that ignores
# unknown tensors would leave the layer at its initial values.
GUARD = "weight"


class PackedLayer(nn.Module):
    """Stores the tensors of a packed weight `[K, N]`, or of several weights of this size, as buffers.

    The constructor makes an empty layer for loaders. On `device="meta"` the layer needs no memory.

    `MarlinLinear` explains the arguments that are not listed here.

    Args:
        K: rows of the weight, a multiple of 8.
        N: columns of the weight.
        stack: the leading dimensions that all tensors except `lut` have for several weights; () for a single weight.
    """

    b_packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    super_scales: Tensor | None
    super_zeros: Tensor | None
    global_scale: Tensor | None
    lut: Tensor | None
    perm: Tensor | None
    b_high: Tensor | None
    packed_format: Tensor

    def __init__(
        self,
        K: int,
        N: int,
        bias: bool,
        *,
        stack: tuple[int, ...] = (),
        weight_format: str = "uint4b8",
        group_size: int | None = None,
        scale_dtype: torch.dtype = torch.float16,
        zeros_dtype: torch.dtype | None = None,
        super_dtype: torch.dtype | None = None,
        global_scale_per_column: bool = False,
        perm: bool = False,
        block_scales: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        fmt = find_format(weight_format)
        self.weight_format = fmt.name
        self.group_size = resolve_group_size(type(self).__name__, fmt, group_size, K)
        self.dtype = dtype or torch.get_default_dtype()
        grouped = (-(-K // self.group_size), N)
        takes_blocks = fmt.takes_block_scales and self.group_size == SCALE_BLOCK and N % SCALE_BLOCK == 0
        if block_scales and (not takes_blocks or super_dtype is not None):
            raise ValueError(
                f"{type(self).__name__}: block_scales: expected float8_e4m3, group_size {SCALE_BLOCK}, a multiple of "
                f"{SCALE_BLOCK} columns and no super_dtype, got {fmt.name}, {self.group_size}, {N} and {super_dtype}"
            )
        scales = (grouped[0], N // SCALE_BLOCK) if block_scales else grouped

        coded = fmt.zeros_role == "zero_point" or super_dtype is not None
        zeros_dtype = zeros_dtype or (torch.uint8 if coded else scale_dtype)
        blocks = (*stack, -(-K // SUPER_BLOCK), N)
        super_zeros = super_dtype is not None and fmt.zeros_role == "bias" and zeros_dtype == torch.uint8
        specs: dict[str, tuple[bool, tuple[int, ...], torch.dtype]] = {
            "b_packed": (True, (*stack, K // fmt.codes_per_word, N), torch.int32),
            "scales": (True, (*stack, *scales), torch.uint8 if fmt.has_coded_scales else scale_dtype),
            "zeros": (fmt.zeros_role != "none", (*stack, *grouped), zeros_dtype),
            "super_scales": (super_dtype is not None, blocks, super_dtype or torch.float16),
            "super_zeros": (super_zeros, blocks, super_dtype or torch.float16),
            "global_scale": (fmt.has_global_scale, (*stack, N if global_scale_per_column else 1), torch.float32),
            "lut": (fmt.has_lut, (16,), torch.float32),
            "perm": (perm, (*stack, K), torch.int32),
            "b_high": (fmt.high_bits != 0, (*stack, -(-K // fmt.k_per_high_word), N), torch.int32),
        }
        self.register_buffer("packed_format", self._describe(device))
        # Absent buffers come last, because torch.export (2.13) miscounts buffers that follow a None.
        for name, (present, shape, kind) in sorted(specs.items(), key=lambda item: not item[1][0]):
            empty = prefer_huge_pages(torch.empty(shape, dtype=kind, device=device)) if present else None
            self.register_buffer(name, empty)
        held = torch.empty(*stack, N, dtype=self.dtype, device=device) if bias else None
        self.bias = None if held is None else nn.Parameter(held, requires_grad=False)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raises an error for `torch.jit.script`, which calls this method of each module."""
        raise ValueError(
            f"torch.jit.script: expected a model without packed layers, got {type(self).__name__}: use torch.compile, "
            "torch.export or torch.jit.trace"
        )

    def _weights(self, stored: PackedWeight) -> Iterable[PackedWeight]:
        """Returns the weights in the tensors of a state_dict. The caller checks their values."""
        return [stored]

    def _stored(self) -> PackedWeight:
        """Returns the layer's tensors and bias as one weight. The tensors of a stack have its leading dimensions."""
        buffers = self._weight_buffers()
        tensors: dict[str, Any] = {name: buffers[name] for name in WEIGHT_TENSORS}
        return PackedWeight(weight_format=self.weight_format, group_size=self.group_size, bias=self.bias, **tensors)

    def _weight_buffers(self) -> Mapping[str, Any]:
        if "parametrizations" in self._modules:  # a parametrized tensor is a property of the class and not a buffer
            return {name: getattr(self, name) for name in WEIGHT_TENSORS}
        # Not getattr: nn.Module.__getattr__ for each buffer would cost about 2 us per call.
        return self._buffers

    def _arguments(self, bias: Tensor | None = None) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        return operator_arguments(self._weight_buffers(), self.weight_format, self.group_size, bias)

    def _describe(self, device: torch.device | str | None) -> Tensor:
        format_id = list(WEIGHT_FORMATS).index(self.weight_format)
        return torch.tensor([FORMAT_VERSION, format_id, self.group_size], dtype=torch.int32, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLayer":
        before = {name: self._buffers[name] for name in WEIGHT_TENSORS if name in self._buffers}
        packed_format = self.packed_format
        self.dtype = _activation_dtype(fn(torch.empty(0, dtype=self.dtype, device=self.b_packed.device)).dtype)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.bias is not None and self.bias.dtype != _activation_dtype(self.bias.dtype):
            self.bias.data = self.bias.data.to(_activation_dtype(self.bias.dtype))
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None or new is old:
                continue
            if new.dtype != old.dtype:
                new = old.to(new.device)
            self._buffers[name] = _same_for_all(old, new)
        # to_empty() leaves all buffers uninitialized. Loaders fill the weight's buffers, but not `packed_format`.
        if self.packed_format is not packed_format:
            self.packed_format = self._describe(self.packed_format.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.b_packed.is_meta:  # a layer on the meta device has no values to protect
            destination[prefix + GUARD] = torch.zeros(1, dtype=torch.uint8, device=self.b_packed.device)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for plane in (prefix + "b_packed", prefix + "b_high"):
            words = state_dict.get(plane)
            if words is not None and not words.is_contiguous():  # gemm refuses strides; assign=True would keep them
                state_dict = {**state_dict, plane: words.contiguous()}
        found = self._differences(state_dict, prefix)
        given = {name for name in WEIGHT_TENSORS if prefix + name in state_dict}
        # A parametrized tensor is not a buffer, so it is not compared here.
        own = {name for name in WEIGHT_TENSORS if self._buffers.get(name) is not None}
        # An error even with strict=False: the result would mix tensors of two weights.
        if given and given != own and not found:
            missing_keys.extend(prefix + name for name in sorted(own - given))
            unexpected_keys.extend(prefix + name for name in sorted(given - own))
            wanted, got = (", ".join(sorted(names)) for names in (own, given))
            found = [f"{prefix}b_packed: expected all of {wanted} and no other, got {got}"]
        if found:
            error_msgs.extend(f"{type(self).__name__}: {difference}" for difference in found)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        guard = prefix + GUARD
        if guard in unexpected_keys and state_dict[guard].numel() == 1:
            unexpected_keys.remove(guard)

    def _differences(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Returns the reasons why a state_dict cannot be loaded into this layer."""
        described = state_dict.get(prefix + "packed_format")
        if described is not None and not described.is_meta:
            got, mine = described.flatten().tolist(), self._describe("cpu").tolist()
            if got != mine:
                return [f"{prefix}packed_format: expected {_in_words(mine)}, got {_in_words(got)}"]
        found = []
        for name in (*WEIGHT_TENSORS, "bias"):
            mine, other = getattr(self, name), state_dict.get(prefix + name)
            if mine is None or other is None:
                continue
            if mine.shape != other.shape:
                found.append(f"{prefix}{name}: expected shape {list(mine.shape)}, got {list(other.shape)}")
            elif name != "bias" and mine.dtype != other.dtype:
                found.append(f"{prefix}{name}: expected {mine.dtype}, got {other.dtype}")
        tensors: dict[str, Any] = {name: state_dict.get(prefix + name) for name in WEIGHT_TENSORS}
        complete = all((getattr(self, name) is None) == (tensors[name] is None) for name in WEIGHT_TENSORS)
        if complete and not found and not tensors["scales"].is_meta:
            try:
                stored = PackedWeight(weight_format=self.weight_format, group_size=self.group_size, **tensors)
                for weight in self._weights(stored):
                    weight.validate()
            except PackedWeightError as error:
                found.append(f"{prefix}{error}")
        return found


def options_of(weight: PackedWeight) -> dict[str, Any]:
    """Returns the arguments for a `PackedLayer` that has room for a weight's tensors."""
    return {
        "weight_format": weight.weight_format,
        "group_size": weight.group_size,
        "scale_dtype": weight.scales.dtype,
        "zeros_dtype": None if weight.zeros is None else weight.zeros.dtype,
        "super_dtype": None if weight.super_scales is None else weight.super_scales.dtype,
        "global_scale_per_column": weight.global_scale is not None and weight.global_scale.numel() > 1,
        "perm": weight.perm is not None,
        "block_scales": weight.has_block_scales,
    }


def model_device(model: nn.Module) -> torch.device | None:
    """Returns the device of a model's first parameter or, without parameters, of its first buffer."""
    return next((tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())), None)


def _same_for_all(old: Tensor, new: Tensor) -> Tensor:
    """Returns the tensor that a layer uses after its tensor `old` was moved to `new`.

    An embedding and its output layer share their tensors, but `.to()` moves one layer after the other. To
    preserve the sharing, the second layer gets the tensor to which the first layer was moved. It gets `new` if one of
    these tensors was written in between, for example by load_state_dict.
    """
    reference, versions = _moved.get(old, (None, None))
    moved = reference() if reference is not None else None
    if (
        moved is not None
        and versions == (version_of(old), version_of(moved))
        and (moved.device, moved.dtype, moved.shape) == (new.device, new.dtype, new.shape)
    ):
        return moved
    if new is not old:
        _moved[old] = weakref.ref(new), (version_of(old), version_of(new))
    return new


def version_of(tensor: Tensor) -> int:
    """Returns the number of times that a tensor was written."""
    return -1 if tensor.is_inference() else tensor._version  # tensors of inference mode do not count writes


_moved: MutableMapping[Tensor, tuple[weakref.ref[Tensor], tuple[int, int]]] = WeakTensorKeyDictionary()


def _activation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float32 for float64, which the operators do not support. Returns other dtypes unchanged."""
    return torch.float32 if dtype == torch.float64 else dtype


def _in_words(packed_format: list[int]) -> str:
    names = list(WEIGHT_FORMATS)
    if len(packed_format) != 3 or packed_format[0] != FORMAT_VERSION or not 0 <= packed_format[1] < len(names):
        return f"an unknown version or format {packed_format}"
    return f"{names[packed_format[1]]} with group_size {packed_format[2]}"
