// Decodes 4-bit codes. A word holds k = 0..7 of one column, lowest k in the lowest nibble. One mask extracts two
// nibbles, k and k + 4, one from each 16-bit half of the word. The masked word is then read as a half2.
#pragma once

#include "kernels/gemm/function_constants.h"

namespace marlin {

// Eight values of consecutive k.
template <typename T>
struct Vec8 {
  T k[kCodesPerWord];
};

// Pair i holds k = i and k = i + 4.
MARLIN_INLINE Vec8<half> make_vec8(half2 pair0, half2 pair1, half2 pair2, half2 pair3) {
  return {{pair0.x, pair1.x, pair2.x, pair3.x, pair0.y, pair1.y, pair2.y, pair3.y}};
}

// Decodes E2M1 codes j and j + 4 of a word to their values times 2^-14. Each code is moved to bits 12..9 of a half. The
// code's exponent and mantissa are then in the half's fields. Adding 0x7000 carries the sign to bit 15, and a mask
// drops the other bits. Code 1 becomes a half subnormal. On Apple GPUs, a left shift by 1 to 4 is free inside an
// addition. Any other shift takes four cycles of the slow ALU (M1, metal-benchmarks).
MARLIN_INLINE half2 e2m1_scaled(uint word, uint j) {
  const uint even = word & 0x0F0F0F0Fu;
  const uint odd = word & 0xF0F0F0F0u;
  const uint raised = (odd << 4) + 0x38003800u;  // one bit too low; raised + raised shifts it
  const uint carried = j == 0   ? ((even << 8) << 1) + 0x70007000u
                       : j == 1 ? raised + raised
                       : j == 2 ? (even << 1) + 0x70007000u
                                : (odd >> 3) + 0x70007000u;
  return as_type<half2>(carried & 0x8E008E00u);
}
constant constexpr float kE2M1Unit = 16384.0f;

MARLIN_INLINE Vec8<half> exact_e2m1(uint word) {
  const half2 unit = half2(half(kE2M1Unit));
  return make_vec8(e2m1_scaled(word, 0) * unit, e2m1_scaled(word, 1) * unit, e2m1_scaled(word, 2) * unit,
                   e2m1_scaled(word, 3) * unit);
}

// How FastCodes decodes. To get the code, the caller multiplies the returned value by even_unit(), or by odd_unit() for
// odd k.
struct DecodeOptions {
  bool subnormal;     // codes are read as half subnormals, otherwise as normal halves
  bool separate_odd;  // leaves codes of odd k 16 times too large: saves a shift, but needs separate accumulators
};

// Decodes codes at whatever scale is cheapest. pair() returns the codes of k = j and j + 4 as float2; the widening is
// free, because fp32 instructions read half operands.
template <CodeKind kind>
struct FastCodes;

// Decoding integers needs no shift and no conversion: a nibble q that is masked out of a word and read as a half is q *
// 2^-24, or q * 2^-20 if it sits four bits higher. On a GPU that flushes subnormal halves, 0x6400 (1024) is ORed in and
// subtracted, which gives q or 16 q.
template <>
struct FastCodes<CodeKind::integer> {
  static MARLIN_INLINE float2 pair(uint word, uint j, const threadgroup float*, DecodeOptions form) {
    const bool stays = j % 2 == 1 && form.separate_odd;
    const uint bits = (word >> (4 * (stays ? j - 1 : j))) & (stays ? 0x00F000F0u : 0x000F000Fu);
    return float2(form.subnormal ? as_type<half2>(bits) : as_type<half2>(bits | 0x64006400u) - half2(1024.0h));
  }
  static MARLIN_INLINE float even_unit(DecodeOptions form) { return form.subnormal ? 16777216.0f : 1.0f; }
  static MARLIN_INLINE float odd_unit(DecodeOptions form) {
    return even_unit(form) * (form.separate_odd ? 0.0625f : 1.0f);
  }
};

template <>
struct FastCodes<CodeKind::e2m1> {
  static MARLIN_INLINE float2 pair(uint word, uint j, const threadgroup float*, DecodeOptions form) {
    return float2(e2m1_scaled(word, j) * half2(form.subnormal ? 1.0h : half(kE2M1Unit)));
  }
  static MARLIN_INLINE float even_unit(DecodeOptions form) { return form.subnormal ? kE2M1Unit : 1.0f; }
  static MARLIN_INLINE float odd_unit(DecodeOptions form) { return even_unit(form); }
};

template <>
struct FastCodes<CodeKind::table> {
  static MARLIN_INLINE float2 pair(uint word, uint j, const threadgroup float* table, DecodeOptions) {
    return float2(table[(word >> (4 * j)) & 15u], table[(word >> (4 * j + 16)) & 15u]);
  }
  static MARLIN_INLINE float even_unit(DecodeOptions) { return 1.0f; }
  static MARLIN_INLINE float odd_unit(DecodeOptions) { return 1.0f; }
};

// Decodes a word to half, exactly. An integer q becomes q - zero, where zero is a whole number up to 255. An E2M1 code
// becomes its value. A code of a table becomes the index q.
template <CodeKind kind>
MARLIN_INLINE Vec8<half> exact_codes(uint word, half zero) {
  if (kind == CodeKind::e2m1) return exact_e2m1(word);
  // The ORed halves are 1024 + q and 1024 + 16 q = 16 (64 + q). The results are whole numbers below 2048, so half holds
  // them exactly.
  const uint high = word >> 8;
  const half2 even_offset = half2(1024.0h + zero);
  const half2 odd_offset = half2(-64.0h - zero);
  const half2 sixteenth = half2(0.0625h);
  return make_vec8(as_type<half2>((word & 0x000F000Fu) | 0x64006400u) - even_offset,
                   fma(as_type<half2>((word & 0x00F000F0u) | 0x64006400u), sixteenth, odd_offset),
                   as_type<half2>((high & 0x000F000Fu) | 0x64006400u) - even_offset,
                   fma(as_type<half2>((high & 0x00F000F0u) | 0x64006400u), sixteenth, odd_offset));
}

// Decodes a word of integers to (q - zero) * 2^-9, exactly. Needs subnormal_codes: a masked nibble, read as a half, is
// q * 2^-24 or q * 2^-20. This function takes 8 operations on pairs; exact_codes takes 12.
constant constexpr float kSmallCode = 1.0f / 512;
MARLIN_INLINE Vec8<half> small_codes(uint word, half zero) {
  const uint high = word >> 8;
  const half2 offset = half2(-zero * half(kSmallCode));
  const half2 even = half2(32768.0h);
  const half2 odd = half2(2048.0h);
  return make_vec8(
      fma(as_type<half2>(word & 0x000F000Fu), even, offset), fma(as_type<half2>(word & 0x00F000F0u), odd, offset),
      fma(as_type<half2>(high & 0x000F000Fu), even, offset), fma(as_type<half2>(high & 0x00F000F0u), odd, offset));
}

}  // namespace marlin
