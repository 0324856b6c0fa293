"""The weight formats. Their table is generated from `kernels/shared/types.h`, which the kernels include."""

from dataclasses import dataclass

from torch_marlin_metal.formats_table import GROUP_SIZES as GROUP_SIZES
from torch_marlin_metal.formats_table import ROWS


@dataclass(frozen=True)
class WeightFormat:
    """A row of the table of weight formats. `q` is a code, and `s` is the scale of the code's group and column.

    Attributes:
        name: the name that callers pass to the operators.
        code_kind: how a code is decoded to a number: "integer", "e2m1", "table" or "e4m3".
        code_bits: the bits of a code: 4, 5, 6 or 8.
        fixed_offset: the number subtracted from the integer codes of a format without zeros, else 0.
        scale_coding: "floating" (fp16, bf16 or fp32), "e4m3" or "e8m0" (uint8 codes).
        zeros_role: "none", "zero_point" (uint8 codes or floating values) or "bias" (floating values).
        fixed_group_size: the only valid group size, or None if any of `GROUP_SIZES` and K are valid.
        formula: the weight as a formula of `q`, `s` and, for zeros, `z` or `b`.
    """

    name: str
    code_kind: str
    code_bits: int
    fixed_offset: int
    scale_coding: str
    zeros_role: str
    fixed_group_size: int | None
    formula: str

    @property
    def high_bits(self) -> int:
        """Returns the bits of a code that are stored in `b_high`: 1 or 2 for codes of 5 or 6 bits, else 0."""
        return self.code_bits % 4

    @property
    def codes_per_word(self) -> int:
        """Returns the codes in a word of `b_packed`, 8 or 4. They are consecutive k of one column."""
        return 32 // (self.code_bits - self.high_bits)

    @property
    def k_per_high_word(self) -> int:
        """Returns the number of k in a word of `b_high`, 32 or 16. Without `b_high`, returns 8, the k of a block."""
        return 32 // self.high_bits if self.high_bits else 8

    @property
    def largest_code(self) -> int:
        """Returns the largest code, for example 15 for 4 bits."""
        return (1 << self.code_bits) - 1

    @property
    def has_lut(self) -> bool:
        """Returns True if the format needs an fp32 table of 16 values."""
        return self.code_kind == "table"

    @property
    def has_global_scale(self) -> bool:
        """Returns True if the format supports an optional fp32 `global_scale`."""
        return self.scale_coding == "e4m3"

    @property
    def takes_block_scales(self) -> bool:
        """Returns whether one scale may stand for a block of 128 x 128 weights."""
        return self.code_kind == "e4m3" and not self.has_coded_scales

    @property
    def has_coded_scales(self) -> bool:
        """Returns True if the scales are uint8 codes."""
        return self.scale_coding != "floating"

    @property
    def is_symmetric(self) -> bool:
        """Returns True for integer codes with an offset of half their range and without stored zeros."""
        return self.code_kind == "integer" and self.fixed_offset == 1 << (self.code_bits - 1)


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    name: WeightFormat(name, codes, bits, offset, scales, zeros, group or None, formula)
    for name, codes, bits, offset, scales, zeros, group, formula in ROWS
}
DEFAULT_GROUP_SIZE = 128
# The E2M1 value of each code: sign, two exponent bits (bias 1), one mantissa bit (OCP MX v1.0, 5.3.3).
E2M1_VALUES: tuple[float, ...] = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)

# bitsandbytes' NF4 table (QLoRA, arXiv:2305.14314, appendix E), as float32.
NF4_VALUES: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# Names of the formats in other projects, for example vLLM's scalar types.
ALIASES: dict[str, str] = {
    "u4b8": "uint4b8",
    "u4": "uint4",
    "fp4": "float4_e2m1",
    "float4_e2m1f": "float4_e2m1",
    "nf4": "lut4",
    "u5b16": "uint5b16",
    "u5": "uint5",
    "u6b32": "uint6b32",
    "u6": "uint6",
    "u8b128": "uint8b128",
    "u8": "uint8",
    "float8_e4m3fn": "float8_e4m3",
    "fp8": "float8_e4m3",
    "q4_k": "uint4_bias",
    "q5_k": "uint5_bias",
    "q6_k": "uint6b32",
}
# Names that also imply two-level scales and a group size. They are names of llama.cpp's types.
TWO_LEVELS: dict[str, int] = {"q4_k": 32, "q5_k": 32, "q6_k": 16}
# The table that a name implies if the caller passes none.
NAMED_TABLES: dict[str, tuple[float, ...]] = {"nf4": NF4_VALUES}


def weight_format(name: str) -> WeightFormat:
    """Returns the format for a name or an alias.

    Args:
        name: a key of `WEIGHT_FORMATS` or of `ALIASES`.

    Raises:
        ValueError: the name is unknown. The message lists the known names.
    """
    found = WEIGHT_FORMATS.get(ALIASES.get(name, name))
    if found is None:
        raise ValueError(
            f"weight_format: expected one of {', '.join(WEIGHT_FORMATS)} (or {', '.join(ALIASES)}), got {name!r}"
        )
    return found


def default_group_size(name: str) -> int | None:
    """Returns the group size that a format's name implies, or None if the name allows several."""
    return weight_format(name).fixed_group_size or TWO_LEVELS.get(name)


def resolve_group_size(op: str, fmt: WeightFormat, group_size: int | None, K: int) -> int:
    """Converts the argument `group_size` to the number of rows in a group.

    None means the format's fixed size, or 128 if the size is not fixed. -1 means K.

    Args:
        op: the caller's name, for the error message.
        fmt: the weight format.
        group_size: the caller's argument.
        K: number of rows of the weight.

    Raises:
        ValueError: the format does not support the group size.
    """
    if group_size is None:
        group_size = fmt.fixed_group_size or DEFAULT_GROUP_SIZE
    elif group_size == -1:
        group_size = K
    if not is_group_size(fmt, group_size, K):
        raise ValueError(f"{op}: group_size: {expected_group_sizes(fmt, K)}, got {group_size!r}")
    return group_size


def is_group_size(fmt: WeightFormat, group_size: int, K: int) -> bool:
    """Returns True if the operators support the group size for a weight with K rows."""
    if isinstance(group_size, float):
        return False
    if fmt.fixed_group_size is not None:
        return group_size == fmt.fixed_group_size
    return group_size in GROUP_SIZES or group_size == K


def expected_group_sizes(fmt: WeightFormat, K: int) -> str:
    """Returns the part of an error message that lists the valid group sizes, with the operators' wording."""
    if fmt.fixed_group_size is not None:
        return f"expected {fmt.fixed_group_size} for {fmt.name}"
    return f"expected one of {', '.join(map(str, GROUP_SIZES))}, or K = {K} for {fmt.name}"
