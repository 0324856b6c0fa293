"""Written by build_support/embed_formats.py from kernels/shared/types.h in every build; edit that file."""

# name, code kind, bits of a code, fixed offset, coding of the scales, role of the zeros, fixed group size or 0, formula
ROWS: tuple[tuple[str, str, int, int, str, str, int, str], ...] = (
    ("uint4b8", "integer", 4, 8, "floating", "none", 0, "(q - 8) * s"),
    ("uint4", "integer", 4, 0, "floating", "zero_point", 0, "(q - z) * s"),
    ("uint4_bias", "integer", 4, 0, "floating", "bias", 0, "q * s + b"),
    ("float4_e2m1", "e2m1", 4, 0, "floating", "none", 0, "e2m1(q) * s"),
    ("nvfp4", "e2m1", 4, 0, "e4m3", "none", 16, "e2m1(q) * (e4m3(s) * global_scale)"),
    ("mxfp4", "e2m1", 4, 0, "e8m0", "none", 32, "e2m1(q) * 2^(s - 127)"),
    ("lut4", "table", 4, 0, "floating", "none", 0, "lut[q] * s"),
    ("uint8b128", "integer", 8, 128, "floating", "none", 0, "(q - 128) * s"),
    ("uint8", "integer", 8, 0, "floating", "zero_point", 0, "(q - z) * s"),
    ("uint8_bias", "integer", 8, 0, "floating", "bias", 0, "q * s + b"),
    ("float8_e4m3", "e4m3", 8, 0, "floating", "none", 0, "e4m3(q) * s"),
    ("mxfp8", "e4m3", 8, 0, "e8m0", "none", 32, "e4m3(q) * 2^(s - 127)"),
    ("uint5b16", "integer", 5, 16, "floating", "none", 0, "(q - 16) * s"),
    ("uint5", "integer", 5, 0, "floating", "zero_point", 0, "(q - z) * s"),
    ("uint5_bias", "integer", 5, 0, "floating", "bias", 0, "q * s + b"),
    ("uint6b32", "integer", 6, 32, "floating", "none", 0, "(q - 32) * s"),
    ("uint6", "integer", 6, 0, "floating", "zero_point", 0, "(q - z) * s"),
    ("uint6_bias", "integer", 6, 0, "floating", "bias", 0, "q * s + b"),
)
GROUP_SIZES: tuple[int, ...] = (16, 32, 64, 128, 256)
