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

// With a code at bits 12..9 of a half, where its three low bits are in place, adding 0x7000 carries the sign to bit 15
// and a mask drops the rest: the value times 2^-14, a half subnormal for code 1. Left shifts of 1 to 4 are part of an
// addition on Apple GPUs; others take four cycles of M1's complex unit (agx-facts 3).
MARLIN_INLINE half2 e2m1_scaled(uint word, uint j) {
  const uint even = word & 0x0F0F0F0Fu;
  const uint odd = word & 0xF0F0F0F0u;
  const uint raised = (odd << 4) + 0x38003800u;  // code and sum a bit too low
  const uint carried = j == 0   ? ((even << 8) << 1) + 0x70007000u
                       : j == 1 ? raised + raised
                       : j == 2 ? (even << 1) + 0x70007000u
                                : (odd >> 3) + 0x70007000u;
  return as_type<half2>(carried & 0x8E008E00u);
}
constant constexpr float kE2M1Unit = 16384.0f;

MARLIN_INLINE Octet<half> exact_e2m1(uint word) {
  const half2 unit = half2(half(kE2M1Unit));
  return octet(e2m1_scaled(word, 0) * unit, e2m1_scaled(word, 1) * unit, e2m1_scaled(word, 2) * unit,
               e2m1_scaled(word, 3) * unit);
}

// How codes are read. Each code = value * even_unit(), or odd_unit() for odd k.
struct CodeForm {
  bool subnormal;  // as half subnormals, or through normal halves
  bool odd_apart;  // odd k in a unit of their own, which needs no shift, and running sums of their own
};

// Codes in units that are cheap to read: pair() gives those of k = j and j + 4, widened, which costs nothing: fp32
// operations take halves of a register as they are.
template <CodeKind kind>
struct FastCodes;

// A nibble masked out of a word is q * 2^-24 as half bits, or q * 2^-20 four bits higher: no shift, no convert. Where
// halves must be normal, 0x6400 (1024) is ORed in and subtracted, which gives q and 16 q.
template <>
struct FastCodes<CodeKind::integer> {
  static MARLIN_INLINE float2 pair(uint word, uint j, const threadgroup float*, CodeForm form) {
    const bool stays = j % 2 == 1 && form.odd_apart;
    const uint bits = (word >> (4 * (stays ? j - 1 : j))) & (stays ? 0x00F000F0u : 0x000F000Fu);
    return float2(form.subnormal ? as_type<half2>(bits) : as_type<half2>(bits | 0x64006400u) - half2(1024.0h));
  }
  static MARLIN_INLINE float even_unit(CodeForm form) { return form.subnormal ? 16777216.0f : 1.0f; }
  static MARLIN_INLINE float odd_unit(CodeForm form) { return even_unit(form) * (form.odd_apart ? 0.0625f : 1.0f); }
};

template <>
struct FastCodes<CodeKind::e2m1> {
  static MARLIN_INLINE float2 pair(uint word, uint j, const threadgroup float*, CodeForm form) {
    return float2(e2m1_scaled(word, j) * half2(form.subnormal ? 1.0h : half(kE2M1Unit)));
  }
  static MARLIN_INLINE float even_unit(CodeForm form) { return form.subnormal ? kE2M1Unit : 1.0f; }
  static MARLIN_INLINE float odd_unit(CodeForm form) { return even_unit(form); }
};

template <>
struct FastCodes<CodeKind::table> {
  static MARLIN_INLINE float2 pair(uint word, uint j, const threadgroup float* table, CodeForm) {
    return float2(table[(word >> (4 * j)) & 15u], table[(word >> (4 * j + 16)) & 15u]);
  }
  static MARLIN_INLINE float even_unit(CodeForm) { return 1.0f; }
  static MARLIN_INLINE float odd_unit(CodeForm) { return 1.0f; }
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
