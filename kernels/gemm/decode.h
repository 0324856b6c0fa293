// Decodes the codes of blocks. A block is eight k of one column, with the lowest k in the lowest bits. One mask
// extracts two codes, one from each 16-bit half of a word, and the masked word is then read as a half2. So the eight
// codes of a block are four pairs. A word of 4-bit codes contains k = 0..7, and its pairs are k = j and j + 4. A word
// of 8-bit codes contains k = 0..3. So a block is two such words, and the pairs of each word are k = 0 and 2, and k = 1
// and 3.
#pragma once

#include "kernels/gemm/function_constants.h"

namespace marlin {

// Eight values of consecutive k.
template <typename T>
struct Vec8 {
  T k[kBlockK];
};

// Pair i holds k = i and k = i + 4.
MARLIN_INLINE Vec8<half> make_vec8(half2 pair0, half2 pair1, half2 pair2, half2 pair3) {
  return {{pair0.x, pair1.x, pair2.x, pair3.x, pair0.y, pair1.y, pair2.y, pair3.y}};
}

// The words of a block.
template <WeightFormat format>
struct BlockWords {
  uint word[words_per_block(format)];
  uint high;  // the word of the second plane, shifted so that the block's fields come first
};

// Extracts the bits of codes j and j + 4, whose lower four bits are in `word`. The extracted codes begin at the lowest
// bit of each half. If j is odd and `stays` is true, they begin at bit 4, which saves a shift.
template <uint bits>
MARLIN_INLINE uint code_pair(uint word, uint high, uint j, bool stays) {
  const uint low = (word >> (4 * (stays ? j - 1 : j))) & (stays ? 0x00F000F0u : 0x000F000Fu);
  if (bits == 4) return low;
  const uint field = high_field(bits - 4, j);
  const uint place = stays ? 8 : 4;
  const uint upper = high & (((1u << (bits - 4)) - 1) * 0x00010001u << field);
  return low + (place >= field ? upper << (place - field) : upper >> (field - place));
}

// Returns the index of the word that contains pair j of a block. The two functions below return the k of the pair's
// first and second code.
template <WeightFormat format>
MARLIN_INLINE constexpr uint word_of_pair(uint j) {
  return words_per_block(format) == 2 ? j / 2 : 0;
}
template <WeightFormat format>
MARLIN_INLINE constexpr uint first_of_pair(uint j) {
  return words_per_block(format) == 2 ? j / 2 * 4 + j % 2 : j;
}
template <WeightFormat format>
MARLIN_INLINE constexpr uint second_of_pair(uint j) {
  return first_of_pair<format>(j) + (words_per_block(format) == 2 ? 2 : 4);
}

// Decodes E2M1 codes j and j + 4 of a word to their values times 2^-14. Each code is moved to bits 12..9 of a half, so
// its exponent and mantissa are in the half's fields. The addition of 0x7000 carries the sign to bit 15, and a mask
// clears the other bits. Code 1 becomes a subnormal half. On Apple GPUs, a left shift by 1 to 4 is free inside an
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

// Decodes E4M3 codes 0 and 2 (j = 0), or 1 and 3 (j = 1), of a word to their values times 2^-8. The exponent and
// mantissa of a code are moved into the fields of a half, whose exponent bias is 8 larger. The addition of 0x4000
// carries the sign to bit 15, and a mask clears the other bits. The NaN codes 0x7F and 0xFF become 1.875 and -1.875,
// and no other code becomes these values.
MARLIN_INLINE half2 e4m3_scaled_no_nan(uint word, uint j) {
  const uint raised = j == 0 ? (word & 0x00FF00FFu) << 7 : (word & 0xFF00FF00u) >> 1;
  return as_type<half2>((raised + 0x40004000u) & 0xBF80BF80u);
}
MARLIN_INLINE half2 e4m3_scaled(uint word, uint j) {
  const half2 values = e4m3_scaled_no_nan(word, j);
  return half2(abs(values.x) == 1.875h ? half(NAN) : values.x, abs(values.y) == 1.875h ? half(NAN) : values.y);
}
// Returns true if one of a word's codes is NaN. Only the magnitude 0x7F carries into the sign bit.
MARLIN_INLINE bool has_e4m3_nan(uint word) {
  return (((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) != 0;
}
constant constexpr float kE4M3Unit = 256.0f;

// The way in which FastCodes decodes. The returned numbers are the codes' values in another unit. The caller multiplies
// them by even_unit(), or by odd_unit() for odd k, to get the values.
struct DecodeOptions {
  bool subnormal;     // true to read codes as subnormal halves, false to read them as normal halves
  bool separate_odd;  // true to leave codes of odd k 16 times too large: saves a shift, but needs separate accumulators
};

// Decodes codes at the scale that costs the fewest instructions. pair() returns the codes of pair j as a float2. It
// reads them from a word of the first plane and, if there is a second plane, a word of that plane. The conversion to
// float is free, because fp32 instructions read half operands.
template <CodeKind kind, uint bits>
struct FastCodes;
template <WeightFormat format>
using FastCodesOf = FastCodes<code_kind(format), code_bits(format)>;

// The decode of integers needs no shift and no conversion. A masked nibble q, read as a half, is q * 2^-24, or q *
// 2^-20 if it is four bits higher. On a GPU that flushes subnormal halves, the code ORs in 0x6400 (1024) and subtracts
// 1024, which gives q or 16 q. Both ways are correct for codes of up to six bits.
template <uint bits>
struct FastCodes<CodeKind::integer, bits> {
  static MARLIN_INLINE float2 pair(uint word, uint high, uint j, const threadgroup float*, DecodeOptions form) {
    const uint codes = code_pair<bits>(word, high, j, j % 2 == 1 && form.separate_odd);
    return float2(form.subnormal ? as_type<half2>(codes) : as_type<half2>(codes | 0x64006400u) - half2(1024.0h));
  }
  static MARLIN_INLINE float even_unit(DecodeOptions form) { return form.subnormal ? 16777216.0f : 1.0f; }
  static MARLIN_INLINE float odd_unit(DecodeOptions form) {
    return even_unit(form) * (form.separate_odd ? 0.0625f : 1.0f);
  }
};

template <>
struct FastCodes<CodeKind::e2m1, 4> {
  static MARLIN_INLINE float2 pair(uint word, uint, uint j, const threadgroup float*, DecodeOptions form) {
    return float2(e2m1_scaled(word, j) * half2(form.subnormal ? 1.0h : half(kE2M1Unit)));
  }
  static MARLIN_INLINE float even_unit(DecodeOptions form) { return form.subnormal ? kE2M1Unit : 1.0f; }
  static MARLIN_INLINE float odd_unit(DecodeOptions form) { return even_unit(form); }
};

template <>
struct FastCodes<CodeKind::table, 4> {
  static MARLIN_INLINE float2 pair(uint word, uint, uint j, const threadgroup float* table, DecodeOptions) {
    return float2(table[(word >> (4 * j)) & 15u], table[(word >> (4 * j + 16)) & 15u]);
  }
  static MARLIN_INLINE float even_unit(DecodeOptions) { return 1.0f; }
  static MARLIN_INLINE float odd_unit(DecodeOptions) { return 1.0f; }
};

// A masked byte, read as a half, is q * 2^-24. The odd bytes must be shifted, because in their place they would be the
// exponent and sign.
template <>
struct FastCodes<CodeKind::integer, 8> {
  static MARLIN_INLINE float2 pair(uint word, uint, uint j, const threadgroup float*, DecodeOptions form) {
    const uint bits = (word >> (8 * (j % 2))) & 0x00FF00FFu;
    return float2(form.subnormal ? as_type<half2>(bits) : as_type<half2>(bits | 0x64006400u) - half2(1024.0h));
  }
  static MARLIN_INLINE float even_unit(DecodeOptions form) { return form.subnormal ? 16777216.0f : 1.0f; }
  static MARLIN_INLINE float odd_unit(DecodeOptions form) { return even_unit(form); }
};

// One test of a word finds whether any of its codes is NaN. If so, the word's first value becomes NaN instead of that
// code's own. This suffices, because all values of a word are added to the same sum over k.
template <>
struct FastCodes<CodeKind::e4m3, 8> {
  static MARLIN_INLINE float2 pair(uint word, uint, uint j, const threadgroup float*, DecodeOptions form) {
    half2 values = e4m3_scaled_no_nan(word, j % 2);
    if (j % 2 == 0) values.x = has_e4m3_nan(word) ? half(NAN) : values.x;
    return float2(values * half2(form.subnormal ? 1.0h : half(kE4M3Unit)));
  }
  static MARLIN_INLINE float even_unit(DecodeOptions form) { return form.subnormal ? kE4M3Unit : 1.0f; }
  static MARLIN_INLINE float odd_unit(DecodeOptions form) { return even_unit(form); }
};

// Decodes the bytes of a word of integers to q - zero.
MARLIN_INLINE half4 exact_bytes(uint word, half zero) {
  const half2 offset = half2(1024.0h + zero);
  const half2 even = as_type<half2>((word & 0x00FF00FFu) | 0x64006400u) - offset;
  const half2 odd = as_type<half2>(((word >> 8) & 0x00FF00FFu) | 0x64006400u) - offset;
  return half4(even.x, odd.x, even.y, odd.y);
}

MARLIN_INLINE half4 exact_e4m3(uint word) {
  const half2 even = e4m3_scaled(word, 0) * half2(half(kE4M3Unit));
  const half2 odd = e4m3_scaled(word, 1) * half2(half(kE4M3Unit));
  return half4(even.x, odd.x, even.y, odd.y);
}

MARLIN_INLINE Vec8<half> join(half4 low, half4 high) {
  return {{low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]}};
}

// Decodes a block to half, exactly. An integer q becomes q - zero, where `zero` is an integer up to 255. An E2M1 or
// E4M3 code becomes its value. A code of a table becomes its index q.
template <WeightFormat format>
MARLIN_INLINE Vec8<half> exact_codes(BlockWords<format> words, half zero) {
  const uint word = words.word[0];
  const uint last = words.word[words_per_block(format) - 1];
  if (code_kind(format) == CodeKind::e2m1) return exact_e2m1(word);
  if (code_kind(format) == CodeKind::e4m3) return join(exact_e4m3(word), exact_e4m3(last));
  if (code_bits(format) == 8) return join(exact_bytes(word, zero), exact_bytes(last, zero));
  // The ORed halves are 1024 + q and 1024 + 16 q = 16 (64 + q). The results are integers below 2048, so half represents
  // them exactly.
  const half2 even_offset = half2(1024.0h + zero);
  const half2 odd_offset = half2(-64.0h - zero);
  const half2 sixteenth = half2(0.0625h);
  half2 pairs[4];
  MARLIN_UNROLL for (uint j = 0; j < 4; ++j) {
    const bool is_odd = j % 2 == 1;
    const half2 code = as_type<half2>(code_pair<code_bits(format)>(word, words.high, j, is_odd) | 0x64006400u);
    pairs[j] = is_odd ? fma(code, sixteenth, odd_offset) : code - even_offset;
  }
  return make_vec8(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Decodes the bytes of a word of integers to (q - zero) * 2^-9.
constant constexpr float kSmallCode = 1.0f / 512;
MARLIN_INLINE half4 small_bytes(uint word, half zero) {
  const half2 offset = half2(-zero * half(kSmallCode));
  const half2 even = fma(as_type<half2>(word & 0x00FF00FFu), half2(32768.0h), offset);
  const half2 odd = fma(as_type<half2>((word >> 8) & 0x00FF00FFu), half2(32768.0h), offset);
  return half4(even.x, odd.x, even.y, odd.y);
}

// Decodes a block of integers to (q - zero) * 2^-9, exactly. Requires subnormal_codes: a masked code, read as a half,
// is q * 2^-24, or q * 2^-20 for odd codes. For a word of nibbles, this takes 8 operations on pairs instead of the 12
// of exact_codes.
template <WeightFormat format>
MARLIN_INLINE Vec8<half> small_codes(BlockWords<format> words, half zero) {
  const uint word = words.word[0];
  if (code_bits(format) == 8) {
    return join(small_bytes(word, zero), small_bytes(words.word[words_per_block(format) - 1], zero));
  }
  const half2 offset = half2(-zero * half(kSmallCode));
  half2 pairs[4];
  MARLIN_UNROLL for (uint j = 0; j < 4; ++j) {
    const bool is_odd = j % 2 == 1;
    const half2 code = as_type<half2>(code_pair<code_bits(format)>(word, words.high, j, is_odd));
    pairs[j] = fma(code, half2(is_odd ? 2048.0h : 32768.0h), offset);
  }
  return make_vec8(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace marlin
