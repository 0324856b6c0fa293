// What a 4-bit code means. A word holds k = 0..7 of one column, lowest k in the lowest nibble; masks take two nibbles
// at a time, k and k + 4, one in each half of the word, so that their bits read as a half2.
#pragma once

#include "options.h"

namespace marlin {

enum class CodeKind { integer, e2m1, table };

constexpr CodeKind code_kind(WeightFormat format) {
  return format == WeightFormat::lut4 ? CodeKind::table
         : format == WeightFormat::float4_e2m1 || format == WeightFormat::nvfp4 || format == WeightFormat::mxfp4
             ? CodeKind::e2m1
             : CodeKind::integer;
}

// Eight values of consecutive k.
template <typename T>
struct Octet {
  T k[kCodesPerWord];
};

// Pair i holds k = i and i + 4.
MARLIN_INLINE Octet<half> octet(half2 pair0, half2 pair1, half2 pair2, half2 pair3) {
  return {{pair0.x, pair1.x, pair2.x, pair3.x, pair0.y, pair1.y, pair2.y, pair3.y}};
}

// E2M1 times 2^-14: the sign at bit 15 and the other three bits at 11..9 of a half, where exponent and mantissa meet,
// read as the value (a half subnormal for code 1).
MARLIN_INLINE Octet<half> e2m1_scaled(uint word) {
  const uint low = word << 8;
  const half2 pair3 = as_type<half2>(((word >> 3) & 0x0E000E00u) | (word & 0x80008000u));
  const half2 pair2 = as_type<half2>(((word & 0x07000700u) << 1) + ((word & 0x08000800u) << 4));
  const half2 pair1 = as_type<half2>(((low >> 3) & 0x0E000E00u) | (low & 0x80008000u));
  const half2 pair0 = as_type<half2>(((low & 0x07000700u) << 1) + ((low & 0x08000800u) << 4));
  return octet(pair0, pair1, pair2, pair3);
}
constant constexpr float kE2M1Unit = 16384.0f;

MARLIN_INLINE Octet<half> exact_e2m1(uint word) {
  Octet<half> codes = e2m1_scaled(word);
  MARLIN_UNROLL for (uint i = 0; i < kCodesPerWord; ++i) codes.k[i] *= half(kE2M1Unit);
  return codes;
}

// Codes for running sums over k: even and odd k are summed apart, sum() gives the whole in units of the code.
template <CodeKind kind>
struct SumCodes;

// A nibble masked out of a word is q * 2^-24 as half bits, or q * 2^-20 four bits higher: no shift, no convert. Where
// subnormal halves do not survive, 0x6400 (1024) is ORed in and subtracted, which gives q and 16 q.
template <>
struct SumCodes<CodeKind::integer> {
  typedef half Code;

  static MARLIN_INLINE half2 pair(uint bits) {
    return subnormal_codes ? as_type<half2>(bits) : as_type<half2>(bits | 0x64006400u) - half2(1024.0h);
  }
  static MARLIN_INLINE Octet<half> decode(uint word, const threadgroup float*) {
    const uint high = word >> 8;
    return octet(pair(word & 0x000F000Fu), pair(word & 0x00F000F0u), pair(high & 0x000F000Fu),
                 pair(high & 0x00F000F0u));
  }
  static MARLIN_INLINE float sum(float even, float odd) {
    const float codes = fma(odd, 0.0625f, even);
    return subnormal_codes ? codes * 16777216.0f : codes;
  }
};

template <>
struct SumCodes<CodeKind::e2m1> {
  typedef half Code;

  static MARLIN_INLINE Octet<half> decode(uint word, const threadgroup float*) {
    return subnormal_codes ? e2m1_scaled(word) : exact_e2m1(word);
  }
  static MARLIN_INLINE float sum(float even, float odd) {
    return subnormal_codes ? (even + odd) * kE2M1Unit : even + odd;
  }
};

template <>
struct SumCodes<CodeKind::table> {
  typedef float Code;

  static MARLIN_INLINE Octet<float> decode(uint word, const threadgroup float* table) {
    Octet<float> result;
    MARLIN_UNROLL for (uint i = 0; i < kCodesPerWord; ++i) result.k[i] = table[(word >> (4 * i)) & 15u];
    return result;
  }
  static MARLIN_INLINE float sum(float even, float odd) { return even + odd; }
};

// Exact codes in half: q - zero for integers (zero a whole number up to 255), the value for E2M1, q for a table.
template <CodeKind kind>
MARLIN_INLINE Octet<half> exact_codes(uint word, half zero) {
  if (kind == CodeKind::e2m1) return exact_e2m1(word);
  // 1024 + q, and 1024 + 16 q = 16 (64 + q); the differences are whole numbers below 2048, so nothing is rounded.
  const uint high = word >> 8;
  const half2 even_offset = half2(1024.0h + zero);
  const half2 odd_offset = half2(-64.0h - zero);
  const half2 sixteenth = half2(0.0625h);
  return octet(as_type<half2>((word & 0x000F000Fu) | 0x64006400u) - even_offset,
               fma(as_type<half2>((word & 0x00F000F0u) | 0x64006400u), sixteenth, odd_offset),
               as_type<half2>((high & 0x000F000Fu) | 0x64006400u) - even_offset,
               fma(as_type<half2>((high & 0x00F000F0u) | 0x64006400u), sixteenth, odd_offset));
}

}  // namespace marlin
