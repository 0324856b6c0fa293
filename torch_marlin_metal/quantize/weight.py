"""Quantizes float weights to 4 to 8 bits. Rounds to nearest, or searches the best scale and zero point of a group."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.formats import (
    E2M1_VALUES,
    NF4_VALUES,
    TWO_LEVELS,
    WeightFormat,
    default_group_size,
    resolve_group_size,
)
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.huge_pages import prefer_huge_pages
from torch_marlin_metal.packed_weight import FLOAT_DTYPES, MAX_SCALE, SUPER_BLOCK, PackedWeight, has_values
from torch_marlin_metal.quantize.scale_coding import (
    E2M1,
    E4M3,
    SMALLEST_SCALE,
    CodeTable,
    E4M3Codes,
    E4M3Scale,
    E8M0Scale,
    FloatScale,
    ScaleCoding,
    Table,
)
from torch_marlin_metal.quantize.two_levels import Level
from torch_marlin_metal.repack import pack_planes

METHODS = ("rtn", "mse")
# Rows are searched in chunks of this many elements. The search needs about ten fp32 tensors of this size.
CHUNK_ELEMENTS = 1 << 20
# Errors of candidates are fp32 sums. A candidate is better only if its error is smaller by more than the rounding
# errors of these sums.
WORTHWHILE = 1 - 2**-12


def quantize_weight(
    w: Tensor,
    weight_format: str = "uint4b8",
    group_size: int | None = None,
    method: str = "rtn",
    *,
    two_levels: bool | None = None,
    scale_dtype: torch.dtype = torch.float16,
    lut: Tensor | None = None,
    mx_rounding: str = "floor",
    amax: float | None = None,
    name: str = "",
) -> PackedWeight:
    """Quantizes the weight of a Linear layer to 4, 5, 6 or 8 bits, on the weight's device.

    "rtn" computes the scale from the extreme values of a group. Let amax be the largest magnitude in the group:

    - The scale is amax/7.5 for uint4b8, amax/15.5 for uint5b16, amax/31.5 for uint6b32 and amax/127.5 for uint8b128
      (the convention of GPTQ and compressed-tensors).
    - For formats with biases or zero points, it is the range of the group divided by the largest code, for example 15
      or 255. With zero points, the range always includes 0.
    - It is amax/6 for E2M1, amax/448 for E4M3 and amax/max|lut| for lut4.
    - For nvfp4, `global_scale` is amax(w)/(448 * 6). For mxfp4 and mxfp8, see `mx_rounding`.

    If the scale of a group rounds to 0 but other groups have larger scales, the weights of the group become 0. "mse"
    starts from the scales of "rtn". For each group, it tries other scales and zero points, and selects those that lower
    the squared error of the group. Its error is therefore never larger than the error of "rtn".

    Args:
        w: `[N, K]` like `nn.Linear.weight`, in float16, bfloat16 or float32, with K a multiple of 8.
        weight_format: a name in `WEIGHT_FORMATS` or an alias. "nf4" is lut4 with NF4's table. "q4_k", "q5_k" and "q6_k"
            have two-level scales: uint4_bias and uint5_bias in groups of 32, uint6b32 in groups of 16. They take 4.625,
            5.625 and 6.5625 bits per weight.
        group_size: 16, 32, 64, 128, 256, or -1 for K. The last group may be shorter. None means the format's fixed
            size, or 128 if there is none.
        method: "rtn" or "mse".
        two_levels: True for two-level scales and biases. None means True for "q4_k", "q5_k" and "q6_k", else False.
            Only formats with floating-point scales and group sizes of at most 256 support two levels.
        scale_dtype: dtype of floating-point scales, of biases, and of the values of two-level scales. The default is
            float16 for every dtype of `w`, because float16 has more significant bits than bfloat16. A scale above the
            dtype's range raises an error.
        lut: the table of lut4, float32 `[16]`. None means NF4's table.
        mx_rounding: the rounding of a group's exponent in mxfp4 and mxfp8: "floor" (OCP MX v1.0, 6.3), "even" (first
            rounds amax to the mantissa bits of a code, one for E2M1 and three for E4M3) or "rceil" (rounds up, so no
            weight saturates).
        amax: for nvfp4, the value of amax(w) in the formula of `global_scale`, if several weights share this scale.
            None means this weight's own amax.
        name: the value of `name` in the result.

    Returns:
        A PackedWeight: words int32 `[K/8, N]` or `[K/4, N]`, scales `[G, N]` and, depending on the format, uint8 zero
        points, biases, and the upper bits of codes of 5 and 6 bits.

    Raises:
        ValueError: a dtype, shape or argument is invalid; a weight is not finite; a scale is outside the range of
            `scale_dtype` or the format; or the weights are so small that the largest scale would have fewer than five
            significant bits.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "nvfp4", method="mse")
        >>> (weight.K, weight.N, weight.group_size)
        (64, 24, 16)
    """
    fmt = find_format(weight_format)
    _check(w, fmt, method, scale_dtype, lut, mx_rounding)
    w = w.detach()
    N, K = w.shape
    size = default_group_size(weight_format) if group_size is None else group_size
    group_size = resolve_group_size("quantize_weight", fmt, size, K)
    two_levels = weight_format in TWO_LEVELS if two_levels is None else two_levels
    if two_levels and (fmt.has_coded_scales or group_size > SUPER_BLOCK):
        kinds = (
            f"False for {fmt.name}" if fmt.has_coded_scales else f"groups of at most {SUPER_BLOCK}, got {group_size}"
        )
        raise ValueError(f"quantize_weight: two_levels: expected {kinds}")
    if not has_values(w):
        return empty_weight(w, fmt, group_size, scale_dtype, name, two_levels)
    low, high = (float(extreme) for extreme in torch.aminmax(w))
    if not -torch.inf < low <= high < torch.inf:
        raise ValueError(f"quantize_weight: w: expected finite weights, got values from {low} to {high}")
    largest = abs(max(-low, high))  # abs turns -0 into 0
    if amax is not None and not (fmt.has_global_scale and largest <= amax < torch.inf):
        expected = f"a finite number of at least {largest:.9g}" if fmt.has_global_scale else f"None for {fmt.name}"
        raise ValueError(f"quantize_weight: amax: expected {expected}, got {amax}")
    found_dtype = torch.float32 if two_levels else scale_dtype
    coding: ScaleCoding = FloatScale(found_dtype)
    if fmt.scale_coding == "e4m3":
        coding = E4M3Scale(largest if amax is None else amax, w.device)
    elif fmt.scale_coding == "e8m0":
        coding = E8M0Scale(mx_rounding, E2M1 if fmt.code_kind == "e2m1" else E4M3)
        coding.check(largest)
    table = _code_table(fmt, lut, w.device)
    search = _Search(fmt, coding, found_dtype, table, method, two_levels)

    b_packed = prefer_huge_pages(torch.empty(K // fmt.codes_per_word, N, dtype=torch.int32, device=w.device))
    b_high = None
    if fmt.high_bits:
        b_high = prefer_huge_pages(torch.empty(-(-K // fmt.k_per_high_word), N, dtype=torch.int32, device=w.device))
    held: dict[str, list[Tensor]] = {}
    whole = K - K % group_size
    parts = [(k, g) for k, g in ((slice(0, whole), group_size), (slice(whole, K), K - whole)) if k.start < k.stop]
    rows = max(1, CHUNK_ELEMENTS // K)
    for n in (slice(start, min(start + rows, N)) for start in range(0, N, rows)):
        chunk = w[n]
        groups = [chunk[:, k].float().reshape(-1, g) for k, g in parts]
        best = [search.best(x) for x in groups]
        scale = torch.cat([one.view(len(chunk), -1) for one, _ in best], 1)
        zeros = [zero.view(len(chunk), -1) for _, zero in best if zero is not None]
        zero = torch.cat(zeros, 1) if zeros else None
        stored = {"scales": scale}
        if zero is not None:
            stored["zeros"] = zero.to(torch.uint8 if fmt.zeros_role == "zero_point" else scale_dtype)
        effective = coding.effective(scale)
        if two_levels:
            # Only formats without zeros benefit from negative scales, which "mse" tries.
            level = Level.of(effective, group_size, scale_dtype, signed=method != "rtn" and zero is None)
            stored |= {"scales": level.codes, "super_scales": level.values}
            effective = level.products()
            if zero is not None and fmt.zeros_role == "bias":
                level = Level.of(zero, group_size, scale_dtype, signed=False)
                stored |= {"zeros": level.codes, "super_zeros": level.values}
                zero = level.products()
        codes = torch.empty(chunk.shape, dtype=torch.uint8, device=w.device)
        for x, (k, _) in zip(groups, parts, strict=True):
            of = slice(k.start // group_size, -(-k.stop // group_size))
            offset = None if zero is None else zero[:, of].flatten()
            codes[:, k] = search.encode(x, effective[:, of].flatten(), offset).view(len(chunk), -1)
        b_packed[:, n], upper = pack_planes(codes.T, fmt.code_bits)
        if b_high is not None and upper is not None:
            b_high[:, n] = upper
        for key, tensor in stored.items():
            held.setdefault(key, []).append(tensor.T)
    tensors: dict[str, Any] = {key: torch.cat(pieces, 1).contiguous() for key, pieces in held.items()}
    if not fmt.has_coded_scales:
        floating = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point()}
        for key, tensor in floating.items():
            _check_range("scale" if "scale" in key else "bias", tensor)
        if low or high:
            _check_not_lost(list(floating.values()))
    return PackedWeight(
        b_packed=b_packed,
        weight_format=fmt.name,
        group_size=group_size,
        global_scale=coding.global_scale if isinstance(coding, E4M3Scale) else None,
        lut=table.values if fmt.has_lut and isinstance(table, CodeTable) else None,
        b_high=b_high,
        name=name,
        **tensors,
    )


@dataclass(frozen=True)
class _Search:
    """Selects scale and zero of groups `x [R, g]` (fp32). `zero` is fp32 `[R]`, a zero point or a bias, or None."""

    fmt: WeightFormat
    coding: ScaleCoding
    bias_dtype: torch.dtype
    table: Table | None  # None if the codes are integers
    method: str
    biases_below_0: bool  # True for two levels: the biases of a block must have one sign, so all are at most 0

    def encode(self, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Returns the nearest codes, uint8 [R, g]. For a scale of 0, returns the code nearest to 0."""
        scale = torch.where(scale == 0, torch.inf, scale).unsqueeze(1)
        if self.fmt.zeros_role == "bias" and zero is not None:
            return torch.round((x - zero.unsqueeze(1)) / scale).clamp_(0, self.fmt.largest_code).to(torch.uint8)
        if self.table is not None:
            return self.table.encode(x / scale)
        return (torch.round(x / scale) + self._offset(zero)).clamp_(0, self.fmt.largest_code).to(torch.uint8)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Returns the fp32 weights, computed by the operators' products in the same order."""
        if self.fmt.zeros_role == "bias" and zero is not None:
            return codes * scale.unsqueeze(1) + zero.unsqueeze(1)
        return self._levels(codes, zero) * scale.unsqueeze(1)

    def best(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the stored scale [R] and zero [R] for each group."""
        best_scale, best_zero = self._from_extremes(x)
        if self.method == "rtn":
            return best_scale, best_zero
        best_error = self._error(x, best_scale, best_zero)

        def consider(scale: Tensor, zero: Tensor | None) -> None:
            nonlocal best_scale, best_zero, best_error
            error = self._error(x, scale, zero)
            better = error < best_error * WORTHWHILE
            best_error = torch.where(better, error, best_error)
            best_scale = torch.where(better, scale, best_scale)
            if zero is not None and best_zero is not None:
                best_zero = torch.where(better, zero, best_zero)

        for scale, zero in self._candidates(x, best_scale, best_zero):
            consider(scale, zero)
        if not self.fmt.has_coded_scales:
            for _ in range(3):
                consider(*self._least_squares(x, best_scale, best_zero))
        return best_scale, best_zero

    def _offset(self, zero: Tensor | None) -> Tensor | float:
        return float(self.fmt.fixed_offset) if zero is None else zero.unsqueeze(1)

    def _levels(self, codes: Tensor, zero: Tensor | None) -> Tensor:
        return self.table.decode(codes) if self.table is not None else codes - self._offset(zero)

    def _error(self, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        effective = self.coding.effective(scale)
        return (self.decode(self.encode(x, effective, zero), effective, zero) - x).square_().sum(1)

    def _span(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the range that the codes must cover. The range includes 0 unless the bias is unrestricted."""
        low, high = x.amin(1), x.amax(1)
        is_free = self.fmt.zeros_role == "bias" and not self.biases_below_0
        return (low, high) if is_free else (low.clamp(max=0), high.clamp(min=0))

    def _bias(self, exact: Tensor) -> Tensor:
        return (exact.clamp(max=0) if self.biases_below_0 else exact).to(self.bias_dtype).float()

    @property
    def _reach(self) -> float:
        """Returns the largest code value or, for formats with zeros, the distance between the first and last code."""
        if self.fmt.zeros_role != "none":
            return float(self.fmt.largest_code)
        offset = self.fmt.fixed_offset
        return min(offset, self.fmt.largest_code - offset) + 0.5 if self.table is None else self.table.reach

    def _extent(self, x: Tensor) -> Tensor:
        """Returns the number that reach * scale must cover: the group's range, or its largest magnitude."""
        low, high = self._span(x)
        return high - low if self.fmt.zeros_role != "none" else torch.maximum(high, -low)

    def _from_extremes(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        low, high = self._span(x)
        if self.fmt.zeros_role == "bias":
            zero = self._bias(low)
            return self.coding.from_amax((high - zero).clamp(min=0), self._reach), zero
        scale = self.coding.from_amax(self._extent(x), self._reach)
        if self.fmt.zeros_role == "zero_point":
            effective = self.coding.effective(scale)
            zero = torch.round(-low / torch.where(effective == 0, torch.inf, effective))
            return scale, zero.clamp_(0, self.fmt.largest_code)
        return scale, None

    def _candidates(self, x: Tensor, scale: Tensor, zero: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        if self.fmt.has_coded_scales:
            for neighbour in self.coding.neighbours(scale):
                yield neighbour, None
            return
        extent = self._extent(x)
        low, high = self._span(x)
        for percent in range(60, 112, 6):
            shrunk = self.coding.from_amax(extent * (percent / 100), self._reach)
            if self.fmt.zeros_role == "bias":
                centred = (low + high) / 2 - self.coding.effective(shrunk) * (self._reach / 2)
                yield shrunk, self._bias(centred)
            elif zero is not None:
                for step in (0, -1, 1):
                    yield shrunk, (zero + step).clamp_(0, self.fmt.largest_code)
            else:
                yield shrunk, None
                if self.table is None or not self.table.by_magnitude:
                    # The codes extend further, or are denser, on one side of 0. A negative scale exchanges the sides.
                    yield -shrunk, None

    def _least_squares(self, x: Tensor, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the least-squares scale (and bias) for the codes of x with the given scale and zero."""
        codes = self.encode(x, self.coding.effective(scale), zero)
        if self.fmt.zeros_role == "bias":
            q = codes.float()
            q_mean, x_mean = q.mean(1, keepdim=True), x.mean(1, keepdim=True)
            slope = _ratio(((q - q_mean) * (x - x_mean)).sum(1), (q - q_mean).square().sum(1)).to(self.coding.dtype)
            intercept = x_mean.squeeze(1) - self.coding.effective(slope) * q_mean.squeeze(1)
            return slope, self._bias(intercept)
        levels = self._levels(codes, zero)
        return _ratio((levels * x).sum(1), levels.square().sum(1)).to(self.coding.dtype), zero


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator == 0, 0.0, numerator / denominator)


def empty_weight(
    w: Tensor, fmt: WeightFormat, group_size: int, scale_dtype: torch.dtype, name: str, two_levels: bool = False
) -> PackedWeight:
    """Returns the result of `quantize_weight` for a weight on the meta device: shapes and dtypes without values."""
    N, K = w.shape
    grouped = (-(-K // group_size), N)
    coded = fmt.has_coded_scales or two_levels
    has_biases = fmt.zeros_role == "bias"
    blocks = w.new_empty((-(-K // SUPER_BLOCK), N), dtype=scale_dtype) if two_levels else None
    zeros_dtype = scale_dtype if has_biases and not two_levels else torch.uint8
    return PackedWeight(
        b_packed=w.new_empty((K // fmt.codes_per_word, N), dtype=torch.int32),
        scales=w.new_empty(grouped, dtype=torch.uint8 if coded else scale_dtype),
        weight_format=fmt.name,
        group_size=group_size,
        zeros=None if fmt.zeros_role == "none" else w.new_empty(grouped, dtype=zeros_dtype),
        super_scales=blocks,
        super_zeros=blocks.clone() if blocks is not None and has_biases else None,
        global_scale=w.new_empty(1, dtype=torch.float32) if fmt.has_global_scale else None,
        lut=w.new_empty(16, dtype=torch.float32) if fmt.has_lut else None,
        b_high=w.new_empty((-(-K // fmt.k_per_high_word), N), dtype=torch.int32) if fmt.high_bits else None,
        name=name,
    )


def _code_table(fmt: WeightFormat, lut: Tensor | None, device: torch.device) -> Table | None:
    if fmt.has_lut:
        values = torch.tensor(NF4_VALUES, device=device) if lut is None else lut.detach()
        return CodeTable(values.to(device), by_magnitude=False)
    if fmt.code_kind == "e2m1":
        return CodeTable(torch.tensor(E2M1_VALUES, device=device), by_magnitude=True)
    if fmt.code_kind == "e4m3":
        return E4M3Codes(device)
    return None


def _check_range(role: str, stored: Tensor) -> None:
    largest = float(stored.abs().amax())
    if not largest <= MAX_SCALE:
        raise ValueError(
            f"quantize_weight: scale_dtype: the largest {role} of this weight became {largest:.3g} in {stored.dtype}; "
            f"expected at most 2^100: use a wider scale_dtype or smaller weights"
        )


def _check_not_lost(stored: list[Tensor]) -> None:
    """Raises an error for scales below the normal range of their dtype, which have few significant bits."""
    numbers = torch.finfo(stored[0].dtype)
    expected = max(32 * numbers.tiny * numbers.eps, SMALLEST_SCALE)  # a scale then has an error of at most 1/64
    largest = max(float(one.abs().amax()) for one in stored)
    if largest < expected:
        raise ValueError(
            f"quantize_weight: scale_dtype: the largest scale of this weight became {largest:.3g} in "
            f"{stored[0].dtype}; expected at least {expected:.3g}: use a wider scale_dtype or larger weights"
        )


def _check(
    w: Tensor, fmt: WeightFormat, method: str, scale_dtype: torch.dtype, lut: Tensor | None, mx_rounding: str
) -> None:
    if not isinstance(w, Tensor):
        raise ValueError(f"quantize_weight: w: expected a tensor, got {type(w).__name__}")
    if w.dtype not in FLOAT_DTYPES:
        raise ValueError(f"quantize_weight: w: expected float16, bfloat16 or float32, got {w.dtype}")
    if w.dim() != 2 or w.shape[0] < 1 or w.shape[1] < 8 or w.shape[1] % 8:
        raise ValueError(f"quantize_weight: w: expected [N, K] with K a multiple of 8, got shape {list(w.shape)}")
    if w.is_meta:
        raise ValueError("quantize_weight: w: expected a tensor with data, got one on the meta device")
    if method not in METHODS:
        raise ValueError(f"quantize_weight: method: expected 'rtn' or 'mse', got {method!r}")
    if scale_dtype not in FLOAT_DTYPES:
        raise ValueError(f"quantize_weight: scale_dtype: expected float16, bfloat16 or float32, got {scale_dtype}")
    if mx_rounding not in E8M0Scale.ROUNDINGS:
        raise ValueError(
            f"quantize_weight: mx_rounding: expected one of {', '.join(E8M0Scale.ROUNDINGS)}, got {mx_rounding!r}"
        )
    if lut is None:
        return
    if not fmt.has_lut:
        raise ValueError(f"quantize_weight: lut: expected None for {fmt.name}, got a tensor")
    if not isinstance(lut, Tensor):
        raise ValueError(f"quantize_weight: lut: expected float32 [16], got {type(lut).__name__}")
    if lut.dtype != torch.float32 or list(lut.shape) != [16]:
        raise ValueError(f"quantize_weight: lut: expected float32 [16], got {lut.dtype} {list(lut.shape)}")
    if has_values(lut) and (not bool(lut.isfinite().all()) or not bool(lut.any())):
        raise ValueError("quantize_weight: lut: expected finite values, not all of them 0")
