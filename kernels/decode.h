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

// Widening is free: fp32 operations take halves of a register as they are.
MARLIN_INLINE Octet<float> widened_octet(half2 pair0, half2 pair1, half2 pair2, half2 pair3) {
  const float2 a = float2(pair0);
  const float2 b = float2(pair1);
  const float2 c = float2(pair2);
  const float2 d = float2(pair3);
  return {{a.x, b.x, c.x, d.x, a.y, b.y, c.y, d.y}};
}

// E2M1 times 2^-14: the sign at bit 15 and the other three bits at 11..9 of a half, where exponent and mantissa meet,
// read as the value (a half subnormal for code 1).
struct E2m1Pairs {
  half2 pair0, pair1, pair2, pair3;
};

MARLIN_INLINE half2 e2m1_of_upper_nibbles(uint word) {
  return as_type<half2>(((word >> 3) & 0x0E000E00u) | (word & 0x80008000u));
}

// Shifts of 1 to 4 are part of an addition on Apple GPUs; others take four cycles of M1's complex unit (agx-facts 3).
MARLIN_INLINE half2 e2m1_of_lower_nibbles(uint word) {
  return as_type<half2>(((word & 0x07000700u) << 1) + ((word & 0x08000800u) << 4));
}

MARLIN_INLINE E2m1Pairs e2m1_scaled(uint word) {
  // A rotation where a shift would do: compilers merge shifts of shifts, into one long shift for each use.
  const uint low = rotate(word, 8u);
  return {e2m1_of_lower_nibbles(low), e2m1_of_upper_nibbles(low), e2m1_of_lower_nibbles(word),
          e2m1_of_upper_nibbles(word)};
}
constant constexpr float kE2M1Unit = 16384.0f;

MARLIN_INLINE Octet<half> exact_e2m1(uint word) {
  const E2m1Pairs pairs = e2m1_scaled(word);
  const half2 unit = half2(half(kE2M1Unit));
  return octet(pairs.pair0 * unit, pairs.pair1 * unit, pairs.pair2 * unit, pairs.pair3 * unit);
}

// Codes in units that are cheap to read, which may differ between even and odd k: code = value * even_unit(), or
// odd_unit(). Running sums over k keep even and odd k apart.
template <CodeKind kind>
struct FastCodes;

// A nibble masked out of a word is q * 2^-24 as half bits, or q * 2^-20 four bits higher: no shift, no convert. Where
// subnormal halves do not survive, 0x6400 (1024) is ORed in and subtracted, which gives q and 16 q.
template <>
struct FastCodes<CodeKind::integer> {
  static MARLIN_INLINE half2 pair(uint bits) {
    return subnormal_codes ? as_type<half2>(bits) : as_type<half2>(bits | 0x64006400u) - half2(1024.0h);
  }
  static MARLIN_INLINE Octet<float> decode(uint word, const threadgroup float*) {
    const uint high = word >> 8;
    return widened_octet(pair(word & 0x000F000Fu), pair(word & 0x00F000F0u), pair(high & 0x000F000Fu),
                         pair(high & 0x00F000F0u));
  }
  static constant constexpr bool odd_differs = true;
  static MARLIN_INLINE float even_unit() { return subnormal_codes ? 16777216.0f : 1.0f; }
  static MARLIN_INLINE float odd_unit() { return subnormal_codes ? 1048576.0f : 0.0625f; }
};

template <>
struct FastCodes<CodeKind::e2m1> {
  static MARLIN_INLINE Octet<float> decode(uint word, const threadgroup float*) {
    const E2m1Pairs pairs = e2m1_scaled(word);
    const half2 unit = half2(subnormal_codes ? 1.0h : half(kE2M1Unit));
    return widened_octet(pairs.pair0 * unit, pairs.pair1 * unit, pairs.pair2 * unit, pairs.pair3 * unit);
  }
  static constant constexpr bool odd_differs = false;
  static MARLIN_INLINE float even_unit() { return subnormal_codes ? kE2M1Unit : 1.0f; }
  static MARLIN_INLINE float odd_unit() { return even_unit(); }
};

template <>
struct FastCodes<CodeKind::table> {
  static MARLIN_INLINE Octet<float> decode(uint word, const threadgroup float* table) {
    Octet<float> result;
    MARLIN_UNROLL for (uint i = 0; i < kCodesPerWord; ++i) result.k[i] = table[(word >> (4 * i)) & 15u];
    return result;
  }
  static constant constexpr bool odd_differs = false;
  static MARLIN_INLINE float even_unit() { return 1.0f; }
  static MARLIN_INLINE float odd_unit() { return 1.0f; }
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
