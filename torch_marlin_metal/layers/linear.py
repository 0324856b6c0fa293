"""A Linear layer with a packed weight."""

from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal import extension  # noqa: F401  registers the operators
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.layers.packed_layer import PackedLayer, options_of
from torch_marlin_metal.layers.weight_info import WeightInfo
from torch_marlin_metal.packed_weight import WEIGHT_TENSORS, PackedWeight, operator_arguments
from torch_marlin_metal.quantize.weight import quantize_weight

_gemm = torch.ops.torch_marlin_metal.gemm.default
_gemm_fp32 = torch.ops.torch_marlin_metal.gemm_fp32.default


class MarlinLinear(PackedLayer):
    """`nn.Linear` with a packed weight: `y = a @ w.T + bias`, computed by `torch.ops.torch_marlin_metal.gemm`.

    The constructor makes an empty layer for loaders. On `device="meta"` the layer needs no memory. `from_linear` and
    `from_packed` make layers with weights. The state_dict has `b_packed`, `scales`, `packed_format` and, if the weight
    has them, `zeros`, `global_scale`, `lut`, `perm` and `bias`. It also has a `weight` of one byte, which this layer
    ignores. If an `nn.Linear` loads this state_dict by mistake, the wrong size of `weight` raises an error, even with
    `strict=False`. `.half()`, `.bfloat16()` and `.to(dtype)` convert only the bias. `.double()` converts the bias to
    float32, because no kernel supports float64. The output has the dtype of the activations.

    Args:
        in_features: K, a multiple of 8.
        out_features: N.
        bias: True if the layer has a bias.
        weight_format: a name of `WEIGHT_FORMATS` or an alias.
        group_size: 16, 32, 64, 128, 256 or K. -1 means K. None means the format's fixed size, or 128 if there is none.
        scale_dtype: dtype of floating-point scales.
        zeros_dtype: dtype of the zeros. None means uint8 for zero points and `scale_dtype` for biases of uint4_bias.
        super_dtype: dtype of `super_scales` for two-level scales. `scale_dtype` is then uint8 or int8. Biases have two
            levels too if `zeros_dtype` is uint8.
        global_scale_per_column: True if nvfp4's `global_scale` has a value per column, False if it has a single value.
        perm: True if the weight has an act-order permutation.
        block_scales: True if one scale is for a block of 128 x 128 weights, see `PackedWeight.scales`.
        device: device of the tensors.
        dtype: dtype of the bias and value of `.weight.dtype`. None means the default dtype.

    Examples:
        >>> layer = tmm.MarlinLinear.from_linear(nn.Linear(256, 64), "nvfp4", method="mse")
        >>> layer(torch.randn(3, 256)).shape
        torch.Size([3, 64])
    """

    product_dtype: torch.dtype | None = None  # dtype of all products on mps; None means the activations' dtype
    rounds_weights = False  # True: products may round the weight (variant "rounded"), as in models of diffusers
    rounds_in_training = False  # True: the same, but only in training mode; see prepare_for_training
    activations: str | None = None  # see set_activations
    is_split = False  # True: the layer has one process's part of a weight; see torch_marlin_metal.parallel

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
        super_dtype: torch.dtype | None = None,
        global_scale_per_column: bool = False,
        perm: bool = False,
        block_scales: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if in_features < 8 or in_features % 8 or out_features < 1:
            raise ValueError(
                "MarlinLinear: expected in_features a multiple of 8 and out_features >= 1, "
                f"got {in_features} and {out_features}"
            )
        super().__init__(
            in_features,
            out_features,
            bias,
            weight_format=weight_format,
            group_size=group_size,
            scale_dtype=scale_dtype,
            zeros_dtype=zeros_dtype,
            super_dtype=super_dtype,
            global_scale_per_column=global_scale_per_column,
            perm=perm,
            block_scales=block_scales,
            device=device,
            dtype=dtype,
        )
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def from_packed(cls, packed: PackedWeight, *, dtype: torch.dtype | None = None) -> "MarlinLinear":
        """Makes a layer from the tensors of `packed`, without copies.

        Args:
            packed: the weight with its optional bias.
            dtype: the value of `.weight.dtype`. None means the dtype of the bias, else the dtype of floating-point
                scales, else the default dtype.

        Raises:
            PackedWeightError: a field of `packed` violates a rule of its format. The check includes the values of
                scales, at most 2^100, and of E8M0 codes, 16 to 240, because the operators do not check values.
        """
        return cls.from_valid(packed.validate(), dtype=dtype)

    @classmethod
    def from_valid(cls, packed: PackedWeight, *, dtype: torch.dtype | None = None) -> "MarlinLinear":
        """Does the same as `from_packed` without the check, for weights that a reader has validated."""
        global_scale = packed.global_scale
        if find_format(packed.weight_format).has_global_scale:
            one = torch.ones(1, device=packed.b_packed.device)
            global_scale = one if global_scale is None else global_scale.reshape(-1)
        if dtype is None and packed.bias is not None:
            dtype = packed.bias.dtype
        elif dtype is None and packed.super_scales is not None:
            dtype = packed.super_scales.dtype
        elif dtype is None and packed.scales.is_floating_point():
            dtype = packed.scales.dtype
        has_bias = packed.bias is not None
        layer = cls(packed.K, packed.N, has_bias, **options_of(packed), device="meta", dtype=dtype)
        values = {**packed.tensors(), "global_scale": global_scale}
        for name in WEIGHT_TENSORS:
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
        """Quantizes a Linear layer on its device. The new layer shares the bias with `linear`.

        Args:
            linear: a layer with a weight in float16, bfloat16 or float32 and K a multiple of 8.
            weight_format: see `quantize_weight`.
            group_size: see `quantize_weight`.
            method: "rtn" or "mse".
            **options: `scale_dtype`, `lut` and `mx_rounding` of `quantize_weight`.

        Raises:
            ValueError: the weight or an argument is invalid; see `quantize_weight`.
        """
        packed = quantize_weight(linear.weight, weight_format, group_size, method, **options)
        packed.bias = linear.bias
        layer = cls.from_packed(packed, dtype=linear.weight.dtype)
        return layer.train(linear.training)

    def forward(self, a: Tensor) -> Tensor:
        """Computes `[..., out_features]` in a's dtype for `a [..., in_features]` in fp16, bf16 or fp32."""
        # The same as self._arguments(self.bias), without the cost of the call.
        tensors, named = operator_arguments(self._weight_buffers(), self.weight_format, self.group_size, self.bias)
        if self.activations is not None:
            named["activations"] = self.activations
        elif self.rounds_weights or (self.rounds_in_training and self.training):
            named["variant"] = "rounded"
        result: Tensor = _gemm(a, *tensors, **named)
        return result

    def _sums(self, a: Tensor) -> Tensor:
        """Computes the result of `forward` in fp32, before it is rounded to a's dtype."""
        tensors, named = self._arguments(self.bias)
        if self.activations is not None:
            named["activations"] = self.activations
        result: Tensor = _gemm_fp32(a, *tensors, **named)
        return result

    def to_packed(self) -> PackedWeight:
        """Returns the weight and bias as a PackedWeight that shares this layer's tensors."""
        return self._stored()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decodes the weight to `nn.Linear`'s layout `[out_features, in_features]`."""
        return self.to_packed().dequantize(dtype).T

    @property
    def weight(self) -> WeightInfo:
        """Returns the dtype, device and shape of the weight, for models that read them. The result is not a tensor."""
        return WeightInfo(self.dtype, self.b_packed.device, torch.Size((self.out_features, self.in_features)))

    def extra_repr(self) -> str:
        text = (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weight_format={self.weight_format}, group_size={self.group_size}"
        )
        for name in ("scales", "zeros", "super_scales"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dtype != torch.uint8:
                text += f", {name}={str(tensor.dtype).removeprefix('torch.')}"
        if self.activations is not None:
            text += f", activations={self.activations}"
        if self.rounds_weights:
            text += ", rounds_weights=True"
        return text + (", perm=True" if self.perm is not None else "")
