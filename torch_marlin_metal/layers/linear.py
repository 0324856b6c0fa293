"""A Linear layer whose weight stays in 4 bit."""

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torch_marlin_metal import extension  # noqa: F401  registers the operators
from torch_marlin_metal.formats import WEIGHT_FORMATS, resolve_group_size
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.ops import given
from torch_marlin_metal.packed_weight import PackedWeight, PackedWeightError
from torch_marlin_metal.quantize.weight import quantize_weight

FORMAT_VERSION = 1
# The tensors that define the weight. They move between devices but are never converted to another dtype.
WEIGHT_BUFFERS = ("b_packed", "scales", "zeros", "global_scale", "lut", "perm")
# The state_dict has a tensor of one element under the name of the float weight. Without it, a loader that ignores
# unknown tensors would leave a float layer at its initial values. With it, the loader finds a wrong size and stops.
GUARD = "weight"

NO_TENSOR = (
    "got MarlinLinear.weight, which only describes a packed 4-bit weight; call the layer, or layer.dequantize() for "
    "the values"
)

_gemm = torch.ops.torch_marlin_metal.gemm.default


class WeightInfo:
    """Stands in for `layer.weight` in models that read its dtype, device or shape. It is not a tensor."""

    def __init__(self, dtype: torch.dtype, device: torch.device, shape: torch.Size) -> None:
        self.dtype = dtype
        self.device = device
        self.shape = shape
        self.ndim = len(shape)
        self.requires_grad = False

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Returns the same as `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Returns the same as `Tensor.dim`."""
        return self.ndim

    def numel(self) -> int:
        """Returns the same as `Tensor.numel`."""
        return self.shape.numel()

    def __repr__(self) -> str:
        return f"WeightInfo(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raises an error for every operation. Because of it, nn.TransformerEncoderLayer avoids its fused path."""
        raise TypeError(f"{getattr(func, '__name__', func)}: {NO_TENSOR}")

    def __getitem__(self, index: Any) -> NoReturn:
        """Raises an error, because there are no values to take rows from."""
        raise TypeError(f"weight[...]: {NO_TENSOR}")


class MarlinLinear(nn.Module):
    """`nn.Linear` with a packed 4-bit weight: `y = a @ w.T + bias`, computed by `torch.ops.torch_marlin_metal.gemm`.

    The constructor makes an empty layer for loaders; on `device="meta"` it needs no memory. `from_linear` and
    `from_packed` make layers with weights. The state_dict holds `b_packed`, `scales`, `packed_format` and, if the
    weight has them, `zeros`, `global_scale`, `lut`, `perm` and `bias`. It also holds a `weight` of one byte, which this
    layer ignores. Because of its size, `nn.Linear` refuses the state_dict, even with `strict=False`. `.half()`,
    `.bfloat16()` and `.to(dtype)` convert only the bias. `.double()` converts the bias to float32, because no kernel
    takes float64. The output has the dtype of the activations.

    Args:
        in_features: K, a multiple of 8.
        out_features: N.
        bias: whether the layer has a bias.
        weight_format: a name of `WEIGHT_FORMATS` or an alias.
        group_size: 16, 32, 64, 128, 256 or K; -1 means K; None means the format's fixed size, else 128.
        scale_dtype: dtype of floating scales.
        zeros_dtype: dtype of the zeros; None means uint8 for zero points and `scale_dtype` for biases of uint4_bias.
        global_scale_per_column: whether nvfp4's `global_scale` has one value per column instead of a single value.
        perm: whether the weight has an act-order permutation.
        device: device of the tensors.
        dtype: dtype of the bias and the value of `.weight.dtype`; None means the default dtype.
    """

    b_packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    global_scale: Tensor | None
    lut: Tensor | None
    perm: Tensor | None
    packed_format: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        weight_format: str = "uint4b8",
        group_size: int | None = None,
        scale_dtype: torch.dtype = torch.float16,
        zeros_dtype: torch.dtype | None = None,
        global_scale_per_column: bool = False,
        perm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if in_features < 8 or in_features % 8 or out_features < 1:
            raise ValueError(
                "MarlinLinear: expected in_features a multiple of 8 and out_features >= 1, "
                f"got {in_features} and {out_features}"
            )
        fmt = find_format(weight_format)
        K, N = in_features, out_features
        self.in_features, self.out_features = K, N
        self.weight_format = fmt.name
        self.group_size = resolve_group_size("MarlinLinear", fmt, group_size, K)
        self.dtype = dtype or torch.get_default_dtype()
        grouped = (-(-K // self.group_size), N)

        zeros_dtype = zeros_dtype or (torch.uint8 if fmt.zeros_role == "zero_point" else scale_dtype)
        specs: dict[str, tuple[bool, tuple[int, ...], torch.dtype]] = {
            "b_packed": (True, (K // 8, N), torch.int32),
            "scales": (True, grouped, scale_dtype if fmt.scale_coding == "floating" else torch.uint8),
            "zeros": (fmt.zeros_role != "none", grouped, zeros_dtype),
            "global_scale": (fmt.has_global_scale, (N if global_scale_per_column else 1,), torch.float32),
            "lut": (fmt.has_lut, (16,), torch.float32),
            "perm": (perm, (K,), torch.int32),
        }
        self.register_buffer("packed_format", self._describe(device))
        # torch.export (2.13) miscounts buffers that follow a None, so absent buffers come last.
        for name, (present, shape, kind) in sorted(specs.items(), key=lambda item: not item[1][0]):
            self.register_buffer(name, torch.empty(shape, dtype=kind, device=device) if present else None)
        self.bias = nn.Parameter(torch.empty(N, dtype=self.dtype, device=device), requires_grad=False) if bias else None

    @classmethod
    def from_packed(cls, packed: PackedWeight, *, dtype: torch.dtype | None = None) -> "MarlinLinear":
        """Makes a layer that holds the tensors of `packed` (without copying them).

        Args:
            packed: the weight, with its bias if it has one.
            dtype: the value of `.weight.dtype`; None means the dtype of the bias, else of floating scales, else the
                default dtype.

        Raises:
            PackedWeightError: a field of `packed` breaks a rule of its format. This includes scales beyond 2^100 and
                E8M0 codes outside 16..240, because the operators do not check values.
        """
        packed.validate()
        global_scale = packed.global_scale
        if find_format(packed.weight_format).has_global_scale:
            one = torch.ones(1, device=packed.b_packed.device)
            global_scale = one if global_scale is None else global_scale.reshape(-1)
        if dtype is None and packed.bias is not None:
            dtype = packed.bias.dtype
        elif dtype is None and packed.scales.is_floating_point():
            dtype = packed.scales.dtype
        layer = cls(
            packed.K,
            packed.N,
            bias=packed.bias is not None,
            weight_format=packed.weight_format,
            group_size=packed.group_size,
            scale_dtype=packed.scales.dtype,
            zeros_dtype=None if packed.zeros is None else packed.zeros.dtype,
            global_scale_per_column=global_scale is not None and global_scale.numel() > 1,
            perm=packed.perm is not None,
            device="meta",
            dtype=dtype,
        )
        values = {**packed.tensors(), "global_scale": global_scale}
        for name in WEIGHT_BUFFERS:
            setattr(layer, name, values.get(name))
        layer.packed_format = layer._describe(packed.b_packed.device)
        if packed.bias is not None:
            bias = packed.bias
            layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=False)
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        weight_format: str = "uint4b8",
        group_size: int | None = None,
        method: str = "rtn",
        **options: Any,
    ) -> "MarlinLinear":
        """Quantizes a Linear layer on its device; the new layer shares the bias with `linear`.

        Args:
            linear: the layer; its weight is float16, bfloat16 or float32 with K a multiple of 8.
            weight_format: see `quantize_weight`.
            group_size: see `quantize_weight`.
            method: "rtn" or "mse".
            **options: `scale_dtype`, `lut` and `mx_rounding` of `quantize_weight`.

        Raises:
            ValueError: the weight or an argument is wrong; see `quantize_weight`.
        """
        packed = quantize_weight(linear.weight, weight_format, group_size, method, **options)
        packed.bias = linear.bias
        layer = cls.from_packed(packed, dtype=linear.weight.dtype)
        return layer.train(linear.training)

    def forward(self, a: Tensor) -> Tensor:
        """Returns `[..., out_features]` in a's dtype for `a [..., in_features]` in fp16, bf16 or fp32."""
        buffers = self._weight_buffers()
        result: Tensor = _gemm(
            a,
            buffers["b_packed"],
            buffers["scales"],
            weight_format=self.weight_format,
            group_size=self.group_size,
            **given(buffers["zeros"], buffers["global_scale"], buffers["lut"], buffers["perm"], self.bias),
        )
        return result

    def _weight_buffers(self) -> Mapping[str, Any]:
        """Returns a mapping that holds the weight's tensors by name."""
        if "parametrizations" in self._modules:  # a parametrized tensor is a property of the class
            return {name: getattr(self, name) for name in WEIGHT_BUFFERS}
        # nn.Module.__getattr__ for each buffer would cost about 2 us per call.
        return self._buffers

    def to_packed(self) -> PackedWeight:
        """Returns the weight and bias as a PackedWeight that shares this layer's tensors."""
        buffers = self._weight_buffers()
        tensors: dict[str, Any] = {name: buffers[name] for name in WEIGHT_BUFFERS}
        return PackedWeight(weight_format=self.weight_format, group_size=self.group_size, bias=self.bias, **tensors)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight in `nn.Linear`'s layout `[out_features, in_features]`."""
        return self.to_packed().dequantize(dtype).T

    @property
    def weight(self) -> WeightInfo:
        """Returns the weight's dtype, device and shape, for models that read them; the result is not a tensor."""
        return WeightInfo(self.dtype, self.b_packed.device, torch.Size((self.out_features, self.in_features)))

    def extra_repr(self) -> str:
        """Returns sizes, format and dtypes, for `print(model)`."""
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weight_format={self.weight_format}, group_size={self.group_size}"
        )
        for name in ("scales", "zeros"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dtype != torch.uint8:
                text += f", {name}={str(tensor.dtype).removeprefix('torch.')}"
        return text + (", perm=True" if self.perm is not None else "")

    def _describe(self, device: torch.device | str | None) -> Tensor:
        format_id = list(WEIGHT_FORMATS).index(self.weight_format)
        return torch.tensor([FORMAT_VERSION, format_id, self.group_size], dtype=torch.int32, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MarlinLinear":
        before = {name: self._buffers[name] for name in WEIGHT_BUFFERS if name in self._buffers}
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
        # to_empty() leaves all buffers uninitialised. Loaders fill the weight's buffers, but not `packed_format`.
        if self.packed_format is not packed_format:
            self.packed_format = self._describe(self.packed_format.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.b_packed.is_meta:  # an empty layer has no values that could be lost
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
        words = state_dict.get(prefix + "b_packed")
        if words is not None and not words.is_contiguous():  # gemm refuses strides; assign=True would keep them
            state_dict = {**state_dict, prefix + "b_packed": words.contiguous()}
        found = self._differences(state_dict, prefix)
        if found:
            error_msgs.extend(f"MarlinLinear: {difference}" for difference in found)
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
        for name in (*WEIGHT_BUFFERS, "bias"):
            mine, other = getattr(self, name), state_dict.get(prefix + name)
            if mine is None or other is None:
                continue
            if mine.shape != other.shape:
                found.append(f"{prefix}{name}: expected shape {list(mine.shape)}, got {list(other.shape)}")
            elif name != "bias" and mine.dtype != other.dtype:
                found.append(f"{prefix}{name}: expected {mine.dtype}, got {other.dtype}")
        tensors: dict[str, Any] = {name: state_dict.get(prefix + name) for name in WEIGHT_BUFFERS}
        complete = all((getattr(self, name) is None) == (tensors[name] is None) for name in WEIGHT_BUFFERS)
        if complete and not found and not tensors["scales"].is_meta:
            try:
                PackedWeight(weight_format=self.weight_format, group_size=self.group_size, **tensors).validate()
            except PackedWeightError as error:
                found.append(f"{prefix}{error}")
        return found


def _same_for_all(old: Tensor, new: Tensor) -> Tensor:
    """Returns the tensor to which a layer that shares `old` has moved, or `new` if none has.

    An embedding and its output layer share their tensors, but each moves for itself. A write into either tensor since
    the move, for example by load_state_dict, ends the sharing.
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
    """Returns how often a tensor was written."""
    return -1 if tensor.is_inference() else tensor._version  # a tensor of inference mode counts no writes


_moved: MutableMapping[Tensor, tuple[weakref.ref[Tensor], tuple[int, int]]] = WeakTensorKeyDictionary()


def _activation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float32 for float64, which the operators do not take, and any other dtype unchanged."""
    return torch.float32 if dtype == torch.float64 else dtype


def _in_words(packed_format: list[int]) -> str:
    names = list(WEIGHT_FORMATS)
    if len(packed_format) != 3 or packed_format[0] != FORMAT_VERSION or not 0 <= packed_format[1] < len(names):
        return f"an unknown version or format {packed_format}"
    return f"{names[packed_format[1]]} with group_size {packed_format[2]}"
