"""Rounds numbers to stored scales (floating point, E4M3, E8M0) and to the nearest code of a table of values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from torch_marlin_metal.packed_weight import E8M0_CODES, MAX_SCALE

E2M1_LARGEST = 6.0
E4M3_LARGEST, E4M3_LARGEST_CODE = 448.0, 0x7E
E8M0_ONE = 127
SMALLEST_SCALE = 2.0**-126  # GPUs treat smaller scales as 0


class ScaleCoding(Protocol):
    """Converts scales of groups to their stored form, and stored scales to values."""

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of stored scales."""

    def from_amax(self, amax: Tensor, reach: float) -> Tensor:
        """Returns the stored scale with which a code of value `reach` decodes to the magnitude `amax` (fp32)."""

    def effective(self, stored: Tensor) -> Tensor:
        """Returns the fp32 factor by which the operators multiply."""

    def neighbours(self, stored: Tensor) -> Iterator[Tensor]:
        """Yields neighboring stored scales to try. Yields none for floating-point scales, which can have any value."""


@dataclass(frozen=True)
class FloatScale:
    """fp16, bf16 or fp32 scales."""

    dtype: torch.dtype

    def from_amax(self, amax: Tensor, reach: float) -> Tensor:
        return (amax / reach).to(self.dtype)

    def effective(self, stored: Tensor) -> Tensor:
        return stored.float()

    def neighbours(self, stored: Tensor) -> Iterator[Tensor]:
        return iter(())


class E4M3Scale:
    """NVFP4's scales: an E4M3 code for each group, multiplied by one fp32 number for the tensor."""

    dtype = torch.uint8

    def __init__(self, tensor_amax: float, device: torch.device) -> None:
        reach = E4M3_LARGEST * E2M1_LARGEST
        if tensor_amax and not SMALLEST_SCALE <= tensor_amax / reach <= MAX_SCALE:
            raise ValueError(
                f"quantize_weight: w: expected a largest value of {reach * SMALLEST_SCALE:.3g} to "
                f"{reach * MAX_SCALE:.3g} for nvfp4 (a global scale of 2^-126 to 2^100), got {tensor_amax:.3g}"
            )
        ratio = torch.tensor([tensor_amax], dtype=torch.float32, device="cpu") / reach
        self.global_scale = (ratio if tensor_amax else torch.ones(1, device="cpu")).to(device)
        values = e4m3_values()
        self._values = values.to(device)
        self._boundaries = nearest_boundaries(values[: E4M3_LARGEST_CODE + 1]).to(device)

    def from_amax(self, amax: Tensor, reach: float) -> Tensor:
        """Rounds to the nearest code, ties to even. Scales above 448 become 448."""
        return torch.bucketize(amax / reach / self.global_scale, self._boundaries).to(torch.uint8)

    def effective(self, stored: Tensor) -> Tensor:
        """Returns the E4M3 values multiplied by the tensor's scale."""
        return self._values[stored.int()] * self.global_scale

    def neighbours(self, stored: Tensor) -> Iterator[Tensor]:
        """Yields the codes from half the scale to 11/8 of the scale."""
        for step in (-1, 1, -2, 2, -3, 3, -4, -5, -6, -7, -8):
            yield (stored.int() + step).clamp_(0, E4M3_LARGEST_CODE).to(torch.uint8)


@dataclass(frozen=True)
class Element:
    """The codes of an MX format: exponent and value of the largest code, and the number of mantissa bits."""

    name: str
    exponent: int
    largest: float
    mantissa_bits: int


E2M1 = Element("mxfp4", 2, E2M1_LARGEST, 1)
E4M3 = Element("mxfp8", 8, E4M3_LARGEST, 3)


@dataclass(frozen=True)
class E8M0Scale:
    """The power-of-two scales of MX formats, with three ways of rounding the exponent.

    amax is the largest magnitude of a group. "floor" is floor(log2(amax)) minus the exponent of the largest code, which
    is 2 for E2M1 and 8 for E4M3 (OCP MX v1.0, 6.3). "even" first rounds amax to the mantissa bits of the codes, and
    then applies "floor". "rceil" is ceil(log2(amax / largest code)), so no weight saturates.
    """

    ROUNDINGS: ClassVar[tuple[str, ...]] = ("floor", "even", "rceil")

    rounding: str
    element: Element
    dtype: ClassVar[torch.dtype] = torch.uint8

    def check(self, tensor_amax: float) -> None:
        """Raises an error if the largest scale of a weight is outside the operators' range.

        Raises:
            ValueError: the scale is outside the range. The message states the valid range of the largest magnitude.
        """
        code = int(self._code(torch.tensor([tensor_amax], device="cpu"), self.element.largest))
        low, high = (bound - E8M0_ONE for bound in E8M0_CODES)
        if not low <= code - E8M0_ONE <= high:
            raise ValueError(
                f"quantize_weight: w: expected a largest value of {1 << self.element.exponent} * 2^{low} to "
                f"{self.element.largest:g} * 2^{high} for {self.element.name} (scales of 2^{low} to 2^{high}), got "
                f"{tensor_amax:.3g}"
            )

    def from_amax(self, amax: Tensor, reach: float) -> Tensor:
        """Rounds the exponent. A group of zeros gets the scale 1."""
        return self._code(amax, reach).clamp(*E8M0_CODES).to(torch.uint8)

    def _code(self, amax: Tensor, reach: float) -> Tensor:
        if self.rounding == "rceil":
            bits = (amax / reach).view(torch.int32)
            code = (bits >> 23) + (bits & 0x7FFFFF).ne(0)
        else:
            half = 1 << (22 - self.element.mantissa_bits)
            bits = amax.view(torch.int32) + (half if self.rounding == "even" else 0)
            code = (bits >> 23) - self.element.exponent
        return torch.where(amax == 0, E8M0_ONE, code)

    def effective(self, stored: Tensor) -> Tensor:
        """Returns the power of two for each code. The result is exact for the codes of `from_amax`."""
        return (stored.int() << 23).view(torch.float32)

    def neighbours(self, stored: Tensor) -> Iterator[Tensor]:
        """Yields half of the scale and twice the scale."""
        for step in (-1, 1):
            yield (stored.int() + step).clamp_(*E8M0_CODES).to(torch.uint8)


class Table(Protocol):
    """The values of codes that are not integers.

    Attributes:
        reach: the largest magnitude among the values.
        by_magnitude: True if a code has a separate sign bit, so that a negative scale adds no other values.
    """

    reach: float
    by_magnitude: bool

    def encode(self, v: Tensor) -> Tensor:
        """Returns the uint8 codes of the nearest values."""

    def decode(self, codes: Tensor) -> Tensor:
        """Returns the fp32 values of codes."""


class E4M3Codes:
    """The finite E4M3 values as codes. Magnitudes above 448 become 448, and ties are rounded to the even code."""

    reach = E4M3_LARGEST
    by_magnitude = True

    def __init__(self, device: torch.device) -> None:
        self._values = e4m3_values().to(device)

    def encode(self, v: Tensor) -> Tensor:
        magnitude = v.abs().clamp(max=E4M3_LARGEST)
        exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(min=-6)  # -6 is the exponent of subnormal codes
        eighths = torch.round(magnitude * ((130 - exponent) << 23).view(torch.float32)).to(torch.int32)
        code = (((exponent + 6) << 3) + eighths).to(torch.uint8)
        return code | (torch.signbit(v).to(torch.uint8) << 7)

    def decode(self, codes: Tensor) -> Tensor:
        return self._values[codes.int()]


class CodeTable:
    """The values of the 16 codes of FP4 (E2M1) or of a lookup table. `encode` finds the code of the nearest value.

    Args:
        values: fp32 `[16]`.
        by_magnitude: True if the high bit of a code is its sign, as in E2M1. Ties are then rounded to the even code,
            and -0 keeps its sign.
    """

    def __init__(self, values: Tensor, *, by_magnitude: bool) -> None:
        self.values = values
        self.reach = float(values.abs().amax())
        self.by_magnitude = by_magnitude
        ascending, self._order = torch.sort(values[:8].cpu() if by_magnitude else values.cpu())
        self._order = self._order.to(device=values.device, dtype=torch.uint8)
        self._boundaries: list[float] = nearest_boundaries(ascending).tolist()

    def encode(self, v: Tensor) -> Tensor:
        magnitude = v.abs() if self.by_magnitude else v
        # On a CPU, comparing with each boundary is several times as fast as the search of torch.bucketize.
        place = torch.zeros(v.shape, dtype=torch.uint8, device=v.device)
        for boundary in self._boundaries:
            place += magnitude > boundary
        if self.by_magnitude:
            return place | (torch.signbit(v).to(torch.uint8) << 3)
        return self._order[place.int()]

    def decode(self, codes: Tensor) -> Tensor:
        return self.values[codes.int()]


def e4m3_values() -> Tensor:
    """Returns the 256 values of E4M3 (OCP, finite only) in fp32. Codes 0x7F and 0xFF are NaN."""
    return torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8).view(torch.float8_e4m3fn).float()


def nearest_boundaries(ascending: Tensor) -> Tensor:
    """Returns the boundaries between adjacent codes: if v > result[i], the nearest code to v is greater than i.

    At a tie, the even code is the nearest code.
    """
    middle = (ascending[:-1] + ascending[1:]) / 2
    odd = torch.arange(len(middle), device=middle.device) % 2 == 1
    return torch.where(odd, torch.nextafter(middle, torch.full_like(middle, -torch.inf)), middle)
