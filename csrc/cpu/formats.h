// Scalar conversions and code tables. Include this file before any target pragma. All kernels share the out-of-line
// copies that the compiler emits, so these copies may contain only baseline instructions. Inlined copies may use wider
// instructions.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "csrc/core/weight_format.h"

namespace marlin::cpu {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000U} << 16;
  const uint32_t exponent = (h >> 10) & 31U;
  const uint32_t mantissa = h & 0x3FFU;
  const uint32_t normal = ((exponent + 112U) << 23) | (mantissa << 13);
  const uint32_t special = 0x7F800000U | (mantissa << 13);
  const uint32_t subnormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-24F);
  const uint32_t magnitude = exponent == 31U ? special : exponent == 0U ? subnormal : normal;
  return std::bit_cast<float>(sign | magnitude);
}

// Rounds to nearest even. Values beyond the range become inf, and NaNs become quiet NaNs.
inline uint16_t float_to_half(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<uint16_t>(sign | 0x7E00U);
  if (magnitude >= 0x477FF000U) return static_cast<uint16_t>(sign | 0x7C00U);
  if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24, the unit of subnormal halves
    const float sum = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) - 0x3F000000U));
  }
  const uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
  return static_cast<uint16_t>(sign | ((rounded - (112U << 23)) >> 13));
}

inline float bfloat16_to_float(uint16_t b) {
  return std::bit_cast<float>(uint32_t{b} << 16);
}

inline uint16_t float_to_bfloat16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40U;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? quiet_nan : rounded);
}

// OCP E4M3: bias 7, no inf; 0x7F and 0xFF are NaN.
constexpr float e4m3_to_float(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80U} << 24;
  const uint32_t exponent = (code >> 3) & 15U;
  const uint32_t mantissa = code & 7U;
  const uint32_t normal = ((exponent + 120U) << 23) | (mantissa << 20);
  const uint32_t subnormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-9F);
  const uint32_t finite = exponent == 0U ? subnormal : normal;
  return std::bit_cast<float>(sign | ((code & 0x7FU) == 0x7FU ? 0x7FC00000U : finite));
}

// OCP E8M0: 2^(code - 127). Code 0 is the fp32 subnormal 2^-127, and 0xFF is NaN.
constexpr float e8m0_to_float(uint8_t code) {
  const uint32_t finite = code == 0U ? 0x00400000U : uint32_t{code} << 23;
  return std::bit_cast<float>(code == 0xFFU ? 0x7FC00000U : finite);
}

inline const char* element_at(const void* data, ElementType type, int64_t index) {
  return static_cast<const char*>(data) + index * element_bytes(type);
}

inline char* element_at(void* data, ElementType type, int64_t index) {
  return static_cast<char*>(data) + index * element_bytes(type);
}

inline float load_element(const void* data, ElementType type, int64_t index) {
  switch (type) {
    case ElementType::float16:
      return half_to_float(static_cast<const uint16_t*>(data)[index]);
    case ElementType::bfloat16:
      return bfloat16_to_float(static_cast<const uint16_t*>(data)[index]);
    case ElementType::uint8:
      return static_cast<float>(static_cast<const uint8_t*>(data)[index]);
    case ElementType::int8:
      return static_cast<float>(static_cast<const int8_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

// How kernels decode codes, by kind and width: integers of 4 bits, E2M1, tables of 16 values, integers of 8 bits, E4M3,
// and integers of 5 or 6 bits in two planes.
enum class Codes : int32_t { integer, e2m1, table, byte, e4m3, planes };
inline constexpr int kCodesCount = 6;

constexpr Codes codes_of(WeightFormat format) {
  switch (code_kind(format)) {
    case CodeKind::e2m1:
      return Codes::e2m1;
    case CodeKind::table:
      return Codes::table;
    case CodeKind::e4m3:
      return Codes::e4m3;
    default:
      return has_high_plane(format) ? Codes::planes : code_bits(format) == 8 ? Codes::byte : Codes::integer;
  }
}
constexpr bool is_byte_wide(Codes codes) {
  return codes == Codes::byte || codes == Codes::e4m3;
}
// Returns the number of rows of words that hold eight consecutive k.
constexpr int words_per_block(Codes codes) {
  return is_byte_wide(codes) ? 2 : 1;
}

// The value of each code, before scale and zero point. Only the first 2^bits elements are used for codes of `bits`
// bits.
using CodeValues = std::array<float, 256>;

template <WeightFormat format>
constexpr CodeValues values_of_format() {
  CodeValues values{};
  for (int q = 0; q < 1 << code_bits(format); ++q) {
    const auto i = static_cast<size_t>(q);
    if (code_kind(format) == CodeKind::integer)
      values[i] = static_cast<float>(q - static_cast<int>(fixed_offset(format)));
    if (code_kind(format) == CodeKind::e2m1) values[i] = kE2M1Values[i];
    if (code_kind(format) == CodeKind::e4m3) values[i] = e4m3_to_float(static_cast<uint8_t>(q));
  }
  return values;
}

// Returns the values of a format's codes. For a format with a table, these are the values of `lut`.
inline const float* code_values(WeightFormat format, const float* lut) {
#define MARLIN_CODE_VALUES(name, ...)                                             \
  case WeightFormat::name: {                                                      \
    static constexpr CodeValues kValues = values_of_format<WeightFormat::name>(); \
    return has_lut(format) ? lut : kValues.data();                                \
  }
  switch (format) { MARLIN_WEIGHT_FORMATS(MARLIN_CODE_VALUES, ) }
  return nullptr;
}

// Returns the number of bf16 terms that represent every code exactly: 1, or 3 for tables. Returns 0 if a code is not
// finite or is close to overflow. Also returns 0 if a code is so small that the bf16 instructions, which flush
// subnormals, would lose bits (bf16_parts.h).
inline int bf16_parts_of_codes(WeightFormat format, const float* lut) {
  if (code_bits(format) != 4) return 1;  // integers of at most 8 bits, or E4M3
  const float* values = code_values(format, lut);
  bool exact = true;
  uint32_t smallest = ~0U, largest = 0;  // compared as bits, so that NaN is the largest
  for (int q = 0; q < kLutSize; ++q) {
    const float value = values[q];
    const uint32_t magnitude = std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU;
    exact = exact && (magnitude & 0xFFFFU) == 0;
    if (magnitude != 0) smallest = std::min(smallest, magnitude);
    largest = std::max(largest, magnitude);
  }
  if (smallest < std::bit_cast<uint32_t>(0x1p-6F) || largest >= std::bit_cast<uint32_t>(0x1p100F)) return 0;
  return exact ? 1 : 3;
}

}  // namespace marlin::cpu
