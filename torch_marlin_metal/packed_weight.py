"""`PackedWeight`: a weight with codes of 4 to 8 bits in the operators' layout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from torch_marlin_metal.formats import ALIASES, NAMED_TABLES, expected_group_sizes, is_group_size, weight_format

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# The operators' error bound holds for scales up to this value and for E8M0 codes in this range.
MAX_SCALE = 2.0**100
E8M0_CODES = (16, 240)
PIECE = 32768  # up to this number of elements, PyTorch computes in one thread
E4M3_NAN = (0x7F, 0xFF)
# The number of k that share a value of `super_scales` and `super_zeros`.
SUPER_BLOCK = 256
# The rows and columns of a block of weights that share a scale.
SCALE_BLOCK = 128
# The operators' arguments that are tensors of a weight. A layer's buffers have the same names.
WEIGHT_TENSORS = ("b_packed", "scales", "zeros", "super_scales", "super_zeros", "global_scale", "lut", "perm", "b_high")
# The tensors of a weight and its bias whose last dimension is N. `global_scale` may also be a single value.
COLUMN_TENSORS = ("b_packed", "b_high", "scales", "zeros", "super_scales", "super_zeros", "global_scale", "bias")


class PackedWeightError(ValueError):
    """A field of a `PackedWeight` violates a rule of its weight format. `field` is the name of the field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(repr=False)
class PackedWeight:
    """A weight of shape `[K, N]` with codes of 4, 5, 6 or 8 bits.

    Operators accept a `PackedWeight` as one argument. Checkpoint readers and `quantize_weight` create it. A program
    that has the tensors can create it too.

    For `moe_gemm`, the weights of E experts are one `PackedWeight` whose tensors have a leading dimension E. All
    experts share `lut`.

    Attributes:
        b_packed: int32, contiguous, `[K/8, N]` for 4-bit codes and `[K/4, N]` for 8-bit codes. Word (r, n) contains
            consecutive k of column n, the lowest k in the lowest bits: k = 8r..8r+7, or 4r..4r+3. K is a multiple of 8.
            For codes of 5 and 6 bits, it contains the lower four bits.
        scales: `[G, N]` with G = ceil(K / group_size), in fp16, bf16 or fp32. For nvfp4 (E4M3), mxfp4 and mxfp8 (E8M0),
            uint8 codes. With `super_scales`, uint8 or int8 codes. For float8_e4m3 with groups of 128 and N a multiple
            of 128, `[G, N/128]` is valid too: one scale for each block of 128 x 128 weights.
        weight_format: a name in `formats.WEIGHT_FORMATS`. An alias in `formats.ALIASES`, for example "u4b8" or "fp8",
            is replaced by that name.
        group_size: a number in `formats.GROUP_SIZES`, or K. -1 is replaced by K.
        zeros: `[G, N]`, zero points (uint8 or floating point) for uint4 and uint8, and biases (floating point) for
            uint4_bias and uint8_bias. With `super_zeros`, uint8 codes of biases.
        super_scales: `[ceil(K / 256), N]` in fp16, bf16 or fp32, for formats with floating-point scales. The scale of a
            group is then the fp32 product of its code and the value for its 256 k. `group_size` is at most 256.
        super_zeros: like `super_scales`, but for biases. The dtype is that of `super_scales`.
        global_scale: fp32 `[]`, `[1]` or `[N]` for nvfp4, a factor for all scales.
        lut: the table of values, fp32 `[16]`, for lut4. The alias "nf4" supplies it.
        perm: int32 `[K]`. Row j of the packed weight is row perm[j] of the original weight (GPTQ act-order).
        b_high: the upper bits of codes of 5 and 6 bits, int32 `[ceil(K/32), N]` or `[ceil(K/16), N]`, contiguous.
            `repack.pack_planes` packs codes into `b_packed` and `b_high`.
        bias: `[N]`, the bias of the linear layer, or None.
        name: the layer's name in the model, without ".weight".
        source: the name of the weight's checkpoint format, for reports.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32)
        >>> weight
        PackedWeight(K=64, N=24, uint4, group_size=32, scales=float16, zeros, device=cpu)
        >>> made = tmm.PackedWeight(weight.b_packed, weight.scales, "uint4", 32, zeros=weight.zeros)
        >>> torch.equal(made.dequantize(), weight.dequantize())
        True
    """

    b_packed: Tensor
    scales: Tensor
    weight_format: str
    group_size: int
    zeros: Tensor | None = None
    super_scales: Tensor | None = None
    super_zeros: Tensor | None = None
    global_scale: Tensor | None = None
    lut: Tensor | None = None
    perm: Tensor | None = None
    b_high: Tensor | None = None
    bias: Tensor | None = None
    name: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.lut is None and self.weight_format in NAMED_TABLES:
            table = NAMED_TABLES[self.weight_format]
            self.lut = torch.tensor(table, dtype=torch.float32, device=self.b_packed.device)
        self.weight_format = ALIASES.get(self.weight_format, self.weight_format)
        if self.group_size == -1 and self.b_packed.dim() >= 2:
            self.group_size = self.K

    @property
    def K(self) -> int:
        """Returns the number of rows of the unpacked weight, its input features."""
        return weight_format(self.weight_format).codes_per_word * int(self.b_packed.shape[-2])

    @property
    def N(self) -> int:
        """Returns the number of columns of the unpacked weight, its output features."""
        return self.b_packed.shape[-1]

    @property
    def has_block_scales(self) -> bool:
        """Returns True if each block of 128 x 128 weights has one scale."""
        return self.scales.shape[-1:].numel() * SCALE_BLOCK == self.N

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `torch.ops.torch_marlin_metal.*` for this weight without its bias, by name."""
        (b_packed, scales), named = operator_arguments(vars(self), self.weight_format, self.group_size)
        return {"b_packed": b_packed, "scales": scales, **named}

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decodes the weight to floats `[K, N]` in the original order of k: `out[perm[j], :]` is packed row j.

        The weight is computed in fp32 and rounded once. If `perm` contains an index several times, the result has one
        of these rows; which one is unspecified.

        Args:
            dtype: float16, bfloat16 or float32.

        Raises:
            ValueError: a tensor of the weight has the wrong dtype, shape or device.
        """
        out: Tensor = torch.ops.torch_marlin_metal.dequantize(**self.arguments(), dtype=dtype)
        return out

    def __repr__(self) -> str:
        held = [name for name in self.tensors() if name not in ("b_packed", "scales")]
        extra = "".join(f", {name}" for name in held)
        scales = str(self.scales.dtype).removeprefix("torch.")
        name = f"{self.name!r}, " if self.name else ""
        return (
            f"PackedWeight({name}K={self.K}, N={self.N}, {self.weight_format}, group_size={self.group_size}, "
            f"scales={scales}{extra}, device={self.b_packed.device})"
        )

    def tensors(self) -> dict[str, Tensor]:
        """Returns the fields that are tensors, by name."""
        values = ((name, getattr(self, name)) for name in (*WEIGHT_TENSORS, "bias"))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> "PackedWeight":
        """Returns a copy with all tensors on `device`. The dtypes do not change."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def columns(self, which: slice | Tensor) -> "PackedWeight":
        """Returns a weight with the given columns, in the given order, as contiguous copies."""
        cut = self.cut(which)
        if isinstance(which, slice):  # a view would keep the complete tensor in memory
            cut = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in cut.items()}
        return replace(self, **{name: tensor.contiguous() for name, tensor in cut.items()})

    def cut(self, which: slice | Tensor) -> dict[str, Any]:
        """Returns the tensors of `COLUMN_TENSORS` with the given columns only. Tensors cut by a slice are views.

        If the columns are whole blocks, scales of blocks stay scales of blocks. Otherwise each column gets a scale.
        """
        blocks = _blocks_of(which, self.N) if self.has_block_scales else which
        whole = self.expanded_scales() if blocks is None else self
        return {
            name: tensor.detach()[..., blocks if name == "scales" and blocks is not None else which]
            for name, tensor in whole.tensors().items()
            if name in COLUMN_TENSORS and (name != "global_scale" or tensor.numel() > 1)
        }

    def expanded_scales(self) -> "PackedWeight":
        """Returns an equal weight with a scale for each column, or itself if it has no scales of blocks."""
        if not self.has_block_scales:
            return self
        return replace(self, scales=self.scales.repeat_interleave(SCALE_BLOCK, -1))

    def one_level(self) -> "PackedWeight":
        """Returns an equal weight with one-level fp32 scales and biases, or itself if it has no `super_scales`."""
        if self.super_scales is None:
            return self
        groups = torch.arange(self.scales.shape[-2], device=self.scales.device)
        blocks = groups * self.group_size // SUPER_BLOCK

        def product(codes: Tensor | None, values: Tensor | None) -> Tensor | None:
            return codes if codes is None or values is None else codes.float() * values.float().index_select(-2, blocks)

        scales = product(self.scales, self.super_scales)
        assert scales is not None
        zeros = product(self.zeros, self.super_zeros)
        return replace(self, scales=scales, zeros=zeros, super_scales=None, super_zeros=None)

    def validate(self) -> "PackedWeight":
        """Checks all shape, dtype and value rules of the format. Returns the weight itself.

        Raises:
            PackedWeightError: a rule is violated. The message names the field, the expected and the actual value. The
                rules for values are: scales are finite and at most 2^100, E8M0 codes are in 16..240, E4M3 codes are not
                NaN, and perm is a permutation. Tensors of `FakeTensorMode` and on the meta device have no values, so
                only their shapes and dtypes are checked.
        """
        fmt = weight_format(self.weight_format)
        _require("b_packed", self.b_packed, (torch.int32,), (None, None))
        if not self.b_packed.is_contiguous():
            shape, strides = list(self.b_packed.shape), list(self.b_packed.stride())
            raise PackedWeightError("b_packed", f"expected a contiguous tensor, got {shape} with strides {strides}")
        K, N = self.K, self.N
        if K < 8 or K % 8 or N < 1:
            raise PackedWeightError("b_packed", f"expected K >= 8, a multiple of 8, and N >= 1, got K={K}, N={N}")
        if not fmt.high_bits:
            _require_absent("b_high", self.b_high, fmt.name)
        elif self.b_high is None:
            raise PackedWeightError("b_high", f"expected a tensor for {fmt.name}, got None")
        else:
            _require("b_high", self.b_high, (torch.int32,), (-(-K // fmt.k_per_high_word), N))
            if not self.b_high.is_contiguous():
                strides = list(self.b_high.stride())
                raise PackedWeightError("b_high", f"expected a contiguous tensor, got one with strides {strides}")
        if not is_group_size(fmt, self.group_size, K):
            raise PackedWeightError("group_size", f"{expected_group_sizes(fmt, K)}, got {self.group_size!r}")
        grouped = (-(-K // self.group_size), N)
        coded = fmt.has_coded_scales
        if self.super_zeros is not None and self.super_scales is None:
            _require_absent("super_zeros", self.super_zeros, "a weight without super_scales")
        if self.super_scales is not None:
            if coded:
                _require_absent("super_scales", self.super_scales, fmt.name)
            if self.group_size > SUPER_BLOCK:
                expected = f"expected at most {SUPER_BLOCK} with super_scales"
                raise PackedWeightError("group_size", f"{expected}, got {self.group_size}")
            _require("scales", self.scales, (torch.uint8, torch.int8), grouped)
            _require("super_scales", self.super_scales, FLOAT_DTYPES, (-(-K // SUPER_BLOCK), N))
            _check_size("super_scales", self.super_scales)
        else:
            of_blocks = self.has_block_scales and fmt.takes_block_scales and self.group_size == SCALE_BLOCK
            sizes = (grouped[0], N // SCALE_BLOCK) if of_blocks else grouped
            _require("scales", self.scales, (torch.uint8,) if coded else FLOAT_DTYPES, sizes)
            _check_scales(self.scales, fmt.scale_coding)
        if self.super_zeros is not None:
            if fmt.zeros_role != "bias":
                _require_absent("super_zeros", self.super_zeros, fmt.name)
            assert self.super_scales is not None
            _require("super_zeros", self.super_zeros, (self.super_scales.dtype,), tuple(self.super_scales.shape))
            _check_size("super_zeros", self.super_zeros)

        if fmt.zeros_role == "none":
            _require_absent("zeros", self.zeros, fmt.name)
        elif self.zeros is None:
            raise PackedWeightError("zeros", f"expected a tensor for {fmt.name}, got None")
        else:
            dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
            if self.super_zeros is not None:
                dtypes = (torch.uint8,)
            elif fmt.zeros_role == "zero_point":
                dtypes = (torch.uint8, *FLOAT_DTYPES)
            _require("zeros", self.zeros, dtypes, grouped)
            _check_size("zeros", self.zeros)
            if self.zeros.dtype == torch.uint8 and self.super_zeros is None and has_values(self.zeros):
                largest = fmt.largest_code + 1  # GPTQ version 1 with the rule "unmasked" has zero points up to this
                if int(self.zeros.max()) > largest:
                    raise PackedWeightError(
                        "zeros", f"expected zero points of at most {largest}, got {int(self.zeros.max())}"
                    )
        if not fmt.has_global_scale:
            _require_absent("global_scale", self.global_scale, fmt.name)
        elif self.global_scale is not None:
            _require("global_scale", self.global_scale, (torch.float32,), None)
            if tuple(self.global_scale.shape) not in {(), (1,), (N,)}:
                raise PackedWeightError(
                    "global_scale", f"expected shape [], [1] or [{N}], got {list(self.global_scale.shape)}"
                )
            _check_size("global_scale", self.global_scale)
        if not fmt.has_lut:
            _require_absent("lut", self.lut, fmt.name)
        elif self.lut is None:
            raise PackedWeightError("lut", f"expected a tensor for {fmt.name}, got None")
        else:
            _require("lut", self.lut, (torch.float32,), (16,))
            _check_size("lut", self.lut)
        if self.perm is not None:
            _require("perm", self.perm, (torch.int32,), (K,))
            in_order = torch.arange(K, device=self.perm.device)
            if has_values(self.perm) and not torch.equal(self.perm.sort().values.long(), in_order):
                raise PackedWeightError("perm", f"expected a permutation of 0..{K - 1}")
        if self.bias is not None:
            _require("bias", self.bias, FLOAT_DTYPES, (N,))
        return self


def _blocks_of(columns: slice | Tensor, N: int) -> slice | Tensor | None:
    """Returns the numbers of the blocks that make up these columns, or None if they are not whole blocks."""
    if isinstance(columns, slice):
        start, stop, step = columns.indices(N)
        aligned = step == 1 and start % SCALE_BLOCK == stop % SCALE_BLOCK == 0
        return slice(start // SCALE_BLOCK, stop // SCALE_BLOCK) if aligned else None
    if columns.numel() % SCALE_BLOCK:
        return None
    rows = columns.reshape(-1, SCALE_BLOCK)
    blocks = rows[:, 0] // SCALE_BLOCK
    in_order = blocks[:, None] * SCALE_BLOCK + torch.arange(SCALE_BLOCK, device=columns.device)
    return blocks if torch.equal(rows, in_order) else None


def operator_arguments(
    tensors: Mapping[str, Any], weight_format: str, group_size: int, bias: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Returns the positional and the named arguments of `torch.ops.torch_marlin_metal.*` for a weight.

    Absent tensors are omitted, because each argument costs the dispatcher 0.4 us, even None. A loop over names, or
    passing the required tensors by name, would make each call slower.

    Args:
        tensors: a mapping with the keys of WEIGHT_TENSORS.
        weight_format: a name in `formats.WEIGHT_FORMATS`.
        group_size: a number in `formats.GROUP_SIZES`, or K.
        bias: the operator's bias, or None.
    """
    named: dict[str, Any] = {"weight_format": weight_format, "group_size": group_size}
    if tensors["zeros"] is not None:
        named["zeros"] = tensors["zeros"]
    if tensors["super_scales"] is not None:
        named["super_scales"] = tensors["super_scales"]
        if tensors["super_zeros"] is not None:
            named["super_zeros"] = tensors["super_zeros"]
    if tensors["global_scale"] is not None:
        named["global_scale"] = tensors["global_scale"]
    if tensors["lut"] is not None:
        named["lut"] = tensors["lut"]
    if tensors["perm"] is not None:
        named["perm"] = tensors["perm"]
    if tensors["b_high"] is not None:
        named["b_high"] = tensors["b_high"]
    if bias is not None:
        named["bias"] = bias
    return (tensors["b_packed"], tensors["scales"]), named


def _require(field: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...] | None) -> None:
    if tensor.dtype not in dtypes:
        raise PackedWeightError(field, f"expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    got = tuple(tensor.shape)
    matches = shape is None or (
        len(got) == len(shape) and all(want in (None, size) for want, size in zip(shape, got, strict=True))
    )
    if shape is not None and not matches:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise PackedWeightError(field, f"expected shape [{expected}], got {list(got)}")


def _require_absent(field: str, tensor: Tensor | None, format_name: str) -> None:
    if tensor is not None:
        raise PackedWeightError(field, f"expected None for {format_name}, got a tensor of shape {list(tensor.shape)}")


def has_values(tensor: Tensor) -> bool:
    """Returns False for tensors of `FakeTensorMode` and on the meta device, which have no values."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _check_size(field: str, values: Tensor) -> None:
    if not values.is_floating_point() or not has_values(values):
        return
    low, high = _range(values)
    if not -MAX_SCALE <= low <= high <= MAX_SCALE:  # also true for NaN
        raise PackedWeightError(field, f"expected finite values of at most 2^100, got a range of {low} to {high}")


def _range(values: Tensor) -> tuple[float, float]:
    """Returns the smallest and the largest value. Both are NaN if one of the values is NaN."""
    if values.device.type != "cpu" or values.numel() <= PIECE:
        low, high = values.aminmax()
        return low.item(), high.item()
    # Pieces of this size run in one thread. Several threads would wait milliseconds for the readers of files.
    pieces = [piece.aminmax() for piece in torch.split(values.flatten(), PIECE)]
    low, high = torch.stack([piece.min for piece in pieces]).min(), torch.stack([piece.max for piece in pieces]).max()
    return low.item(), high.item()


def _check_scales(scales: Tensor, coding: str) -> None:
    if coding == "floating":
        _check_size("scales", scales)
    elif not has_values(scales):
        return
    elif coding == "e4m3":
        for code in E4M3_NAN:
            if bool((scales == code).any()):
                raise PackedWeightError("scales", f"expected finite E4M3 codes, got a NaN (0x{code:02X})")
    else:
        low, high = map(int, _range(scales))
        if low < E8M0_CODES[0] or high > E8M0_CODES[1]:
            raise PackedWeightError(
                "scales", f"expected E8M0 codes in {E8M0_CODES[0]}..{E8M0_CODES[1]}, got a range of {low} to {high}"
            )
