// Types and arithmetic for shaders and host. Outside the parts for the host, the code uses only what both languages
// accept: no std, fixed-width integers, ASCII.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#include <string_view>
#endif

namespace marlin {

// A packed word contains the codes of consecutive k of one column, with the lowest k in the lowest bits: eight codes of
// 4 bits, or four of 8 bits. Kernels decode blocks of eight consecutive k of a column, and K is a multiple of eight. A
// block of 4-bit codes is one word. A block of 8-bit codes is two words, in two rows. For codes of 5 or 6 bits, such
// words contain the lower four bits, and words of a second plane contain the upper bits of 32 or 16 consecutive k. A
// mask and a shift by at most four bits add the upper bits of two codes, k and k + 4 of a block, to the lower bits. The
// order of the fields in the second plane permits this: see high_shift and high_field. kMaxWordsPerBlock counts the
// words of both planes.
enum { kBlockK = 8, kLutSize = 16, kMaxWordsPerBlock = 2 };
// The number of 4-bit codes in a word.
enum { kNibbles = 8 };

// The number of k that share a value of super_scales and of super_zeros. For scales of two levels, the group size
// divides kSuperBlock, or it is K if K is smaller.
enum { kSuperBlock = 256 };

// With scales of blocks, each scale is for a block of kScaleBlock x kScaleBlock weights. The group size is kScaleBlock
// and N is a multiple of it, so the scale of column n in group g has the index (g * N + n) / kScaleBlock.
enum { kScaleBlock = 128 };

enum { kSimdWidth = 32 };

// Bytes of threadgroup memory per threadgroup: Metal's limit, and an amount that fits three times in the threadgroup
// memory of an M1 core (60 KB). Registers may limit a core to fewer threadgroups.
enum { kMaxThreadgroupBytes = 32 * 1024, kPreferredThreadgroupBytes = 20 * 1024 };

// The meaning of a code: an integer q, an OCP E2M1 or E4M3 value, or an index into a table of 16 values.
enum class CodeKind : int32_t { integer = 0, e2m1 = 1, table = 2, e4m3 = 3 };

// How the scales of the groups are stored.
enum class ScaleCoding : int32_t {
  floating,  // fp16, bf16 or fp32 values; or two levels: uint8 or int8 codes that are multiplied by super_scales
  e4m3,      // uint8 codes, signed OCP E4M3, 0x7F and 0xFF are NaN; a global scale may multiply them
  e8m0,      // uint8 codes, 2^(code - 127), 0xFF is NaN
};

// The meaning of the tensor of zeros.
enum class ZerosRole : int32_t {
  none,        // no tensor: the format subtracts its own offset from integer codes
  zero_point,  // w = (q - z) * s; uint8 codes or floating-point values
  bias,        // w = q * s + b; floating-point values, or two levels: uint8 codes that are multiplied by super_zeros
};

// The weight formats, with all traits of a format except its encoder (quantize/weight.py). A new format whose traits
// have kernels needs only a new row. The row must be at the end, because checkpoints store the number of the row.
// build_support/embed_formats.py writes the rows for Python. In the formulas, q is a code, s the scale of its group and
// column, z the zero point and b the bias. `group` is the only permitted group size, or 0 if all of MARLIN_GROUP_SIZES
// and K itself are permitted.
// clang-format off
//  name         codes    bits offset scales    zeros      group  formula
#define MARLIN_WEIGHT_FORMATS(X, ...)                                                                                \
  X(uint4b8,     integer, 4,   8,     floating, none,       0,    "(q - 8) * s",                        __VA_ARGS__) \
  X(uint4,       integer, 4,   0,     floating, zero_point, 0,    "(q - z) * s",                        __VA_ARGS__) \
  X(uint4_bias,  integer, 4,   0,     floating, bias,       0,    "q * s + b",                          __VA_ARGS__) \
  X(float4_e2m1, e2m1,    4,   0,     floating, none,       0,    "e2m1(q) * s",                        __VA_ARGS__) \
  X(nvfp4,       e2m1,    4,   0,     e4m3,     none,       16,   "e2m1(q) * (e4m3(s) * global_scale)", __VA_ARGS__) \
  X(mxfp4,       e2m1,    4,   0,     e8m0,     none,       32,   "e2m1(q) * 2^(s - 127)",              __VA_ARGS__) \
  X(lut4,        table,   4,   0,     floating, none,       0,    "lut[q] * s",                         __VA_ARGS__) \
  X(uint8b128,   integer, 8,   128,   floating, none,       0,    "(q - 128) * s",                      __VA_ARGS__) \
  X(uint8,       integer, 8,   0,     floating, zero_point, 0,    "(q - z) * s",                        __VA_ARGS__) \
  X(uint8_bias,  integer, 8,   0,     floating, bias,       0,    "q * s + b",                          __VA_ARGS__) \
  X(float8_e4m3, e4m3,    8,   0,     floating, none,       0,    "e4m3(q) * s",                        __VA_ARGS__) \
  X(mxfp8,       e4m3,    8,   0,     e8m0,     none,       32,   "e4m3(q) * 2^(s - 127)",              __VA_ARGS__) \
  X(uint5b16,    integer, 5,   16,    floating, none,       0,    "(q - 16) * s",                       __VA_ARGS__) \
  X(uint5,       integer, 5,   0,     floating, zero_point, 0,    "(q - z) * s",                        __VA_ARGS__) \
  X(uint5_bias,  integer, 5,   0,     floating, bias,       0,    "q * s + b",                          __VA_ARGS__) \
  X(uint6b32,    integer, 6,   32,    floating, none,       0,    "(q - 32) * s",                       __VA_ARGS__) \
  X(uint6,       integer, 6,   0,     floating, zero_point, 0,    "(q - z) * s",                        __VA_ARGS__) \
  X(uint6_bias,  integer, 6,   0,     floating, bias,       0,    "q * s + b",                          __VA_ARGS__)
// clang-format on
#define MARLIN_GROUP_SIZES 16, 32, 64, 128, 256

#define MARLIN_FORMAT_ENUMERATOR(name, ...) name,
enum class WeightFormat : int32_t { MARLIN_WEIGHT_FORMATS(MARLIN_FORMAT_ENUMERATOR, ) };
#define MARLIN_COUNT_FORMAT(...) +1
enum { kWeightFormatCount = MARLIN_WEIGHT_FORMATS(MARLIN_COUNT_FORMAT, ) };

struct FormatTraits {
  CodeKind code_kind;
  uint32_t code_bits;
  uint32_t fixed_offset;
  ScaleCoding scale_coding;
  ZerosRole zeros_role;
  uint32_t fixed_group_size;
};

constexpr FormatTraits traits(WeightFormat format) {
#define MARLIN_FORMAT_TRAITS(name, codes, bits, offset, scales, zeros, group, ...) \
  case WeightFormat::name:                                                         \
    return {CodeKind::codes, bits, offset, ScaleCoding::scales, ZerosRole::zeros, group};
  switch (format) { MARLIN_WEIGHT_FORMATS(MARLIN_FORMAT_TRAITS, ) }
  return {};
}

constexpr CodeKind code_kind(WeightFormat format) {
  return traits(format).code_kind;
}
constexpr uint32_t code_bits(WeightFormat format) {
  return traits(format).code_bits;
}
// Returns the number of bits of a code in the second plane: 0 for formats of one plane.
constexpr uint32_t high_bits(WeightFormat format) {
  return code_bits(format) % 4;
}
constexpr bool has_high_plane(WeightFormat format) {
  return high_bits(format) != 0;
}
// Returns the number of codes in a word of the first plane.
constexpr uint32_t codes_per_word(WeightFormat format) {
  return 32 / (code_bits(format) - high_bits(format));
}
// Returns the number of k in a word of the second plane, which contains `bits` bits of each code. If there is no second
// plane, returns the number of k in a block, so that a part of a weight may begin at every multiple of the result.
constexpr uint32_t k_per_high_word(uint32_t bits) {
  return bits == 0 ? uint32_t{kBlockK} : 32 / bits;
}
// Returns the first bit of a block's fields in either half of a word of the second plane. `block` is k / 8.
constexpr uint32_t high_shift(uint32_t bits, uint32_t block) {
  return bits == 2 ? block % 2 * 8 : block % 2 * 2 + block / 2 % 2 * 8;
}
// Returns the first bit, after high_shift, of the field of the block's code j (0 to 3). The field of code j + 4 is 16
// bits higher.
constexpr uint32_t high_field(uint32_t bits, uint32_t j) {
  return j % 2 * 4 + j / 2 * bits;
}
// Returns the first bit of a code's field in its word of the second plane.
constexpr uint32_t high_bit(uint32_t bits, uint32_t k) {
  return high_shift(bits, k / kBlockK) + k % kBlockK / 4 * 16 + high_field(bits, k % 4);
}
// Returns the number of rows of words that hold eight consecutive k.
constexpr uint32_t words_per_block(WeightFormat format) {
  return kBlockK / codes_per_word(format);
}
// Returns the number that is subtracted from integer codes in formats without zeros.
constexpr uint32_t fixed_offset(WeightFormat format) {
  return traits(format).fixed_offset;
}
constexpr ScaleCoding scale_coding(WeightFormat format) {
  return traits(format).scale_coding;
}
constexpr ZerosRole zeros_role(WeightFormat format) {
  return traits(format).zeros_role;
}
constexpr uint32_t fixed_group_size(WeightFormat format) {
  return traits(format).fixed_group_size;
}
constexpr bool has_lut(WeightFormat format) {
  return code_kind(format) == CodeKind::table;
}
constexpr bool takes_global_scale(WeightFormat format) {
  return scale_coding(format) == ScaleCoding::e4m3;
}
constexpr bool has_coded_scales(WeightFormat format) {
  return scale_coding(format) != ScaleCoding::floating;
}
// Returns true if the format permits scales of blocks of kScaleBlock x kScaleBlock weights.
constexpr bool takes_block_scales(WeightFormat format) {
  return code_kind(format) == CodeKind::e4m3 && !has_coded_scales(format);
}
// Returns true if a zero point or the offset is subtracted from the codes.
constexpr bool subtracts_zero(WeightFormat format) {
  return fixed_offset(format) != 0 || zeros_role(format) == ZerosRole::zero_point;
}

// Returns true if the kernels can compute a format with these traits.
constexpr bool has_kernels(WeightFormat format) {
  const uint32_t bits = code_bits(format);
  const bool integer = code_kind(format) == CodeKind::integer;
  const bool known =
      integer ? (bits >= 4 && bits <= 6) || bits == 8 : bits == (code_kind(format) == CodeKind::e4m3 ? 8 : 4);
  return known && (fixed_offset(format) == 0 || (integer && zeros_role(format) == ZerosRole::none));
}
#define MARLIN_CHECK_FORMAT(name, ...) \
  static_assert(has_kernels(WeightFormat::name), #name " has traits without kernels");
MARLIN_WEIGHT_FORMATS(MARLIN_CHECK_FORMAT, )

#ifndef __METAL_VERSION__
constexpr std::string_view name(WeightFormat format) {
#define MARLIN_FORMAT_NAME(name, ...) \
  case WeightFormat::name:            \
    return #name;
  switch (format) { MARLIN_WEIGHT_FORMATS(MARLIN_FORMAT_NAME, ) }
  return {};
}
#endif

// Element types of activations, scales, zeros and bias in memory.
enum class ElementType : int32_t {
  float16 = 0,
  bfloat16 = 1,
  float32 = 2,
  uint8 = 3,
  int8 = 4,
};

constexpr bool is_integer(ElementType type) {
  return type == ElementType::uint8 || type == ElementType::int8;
}

constexpr uint32_t element_bytes(ElementType type) {
  return type == ElementType::float32 ? 4 : is_integer(type) ? 1 : 2;
}

// The rule by which gptq_unpack_zeros computes a zero point from the value in a GPTQ checkpoint.
enum class StoredZeros : int32_t {
  plain = 0,     // checkpoint version 2: as stored
  word = 1,      // version 1: 0x11111111 is added to the packed word
  masked = 2,    // version 1: (stored + 1) & 15
  unmasked = 3,  // version 1: stored + 1
};

constexpr uint32_t ceil_divide(uint32_t a, uint32_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

constexpr uint32_t round_up(uint32_t value, uint32_t multiple) {
  return ceil_divide(value, multiple) * multiple;
}

}  // namespace marlin
