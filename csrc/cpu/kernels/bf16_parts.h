// Splits activations into sums of bf16 terms ("parts"), and makes tables of codes in bf16, for the kernels that
// multiply in bf16. Include this file after the ISA pragma. All definitions have internal linkage, so the linker cannot
// merge them with copies for other instructions.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "csrc/cpu/kernels/kernel_table.h"

namespace marlin::cpu {

namespace {

#if defined(__x86_64__)
// Makes the table for vpermw, which looks up each 16-bit half of a lane. After a word is shifted right by 4j bits,
// nibble j is at the bottom of its low half, and nibble j + 4 is at the bottom of its high half. One look-up then gives
// the bf16 values of both codes. vpermw reads five index bits, and the fifth bit belongs to the next nibble. So the
// table contains all 16 entries twice.
[[gnu::always_inline]] inline __m512i bf16_table(__m512i upper_halves) {
  return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(upper_halves, 16)));
}

// Converts the four 8-bit codes of each lane to bf16. pairs() sets `even` to codes 0 and 2, and `odd` to codes 1 and 3.
// One table has the upper bytes of the bf16 values, a second one the lower bytes. An index of seven bits is enough for
// both: the eighth bit of E4M3 is the sign, which is copied, and integers in two planes have at most six bits.
template <Codes codes>
class BytePairs {
 public:
  [[gnu::always_inline]] explicit BytePairs(const float* values) {
    for (int part = 0; part < kParts; ++part) {
      alignas(64) uint8_t upper[64], lower[64];
      for (int i = 0; i < 64; ++i) {
        const uint32_t bits = std::bit_cast<uint32_t>(values[64 * part + i]);
        upper[i] = static_cast<uint8_t>(bits >> 24);
        lower[i] = static_cast<uint8_t>(bits >> 16);
      }
      upper_[part] = _mm512_load_si512(upper);
      lower_[part] = _mm512_load_si512(lower);
    }
  }
  [[gnu::always_inline]] void pairs(__m512i word, __m512i& even, __m512i& odd) const {
    constexpr int kAOrBAndC = 0xF8, kSelect = 0xCA;
    const __m512i low = look_up(lower_, word);
    __m512i high = look_up(upper_, word);
    if constexpr (codes == Codes::e4m3) {
      high = _mm512_ternarylogic_epi32(high, word, _mm512_set1_epi8(static_cast<char>(0x80)), kAOrBAndC);
    }
    const __m512i lower_bytes = _mm512_set1_epi16(0x00FF);
    even = _mm512_ternarylogic_epi32(lower_bytes, low, _mm512_slli_epi16(high, 8), kSelect);
    odd = _mm512_ternarylogic_epi32(lower_bytes, _mm512_srli_epi16(low, 8), high, kSelect);
  }

 private:
  static constexpr int kParts = codes == Codes::planes ? 1 : 2;
  [[gnu::always_inline]] static __m512i look_up(const __m512i (&table)[kParts], __m512i index) {
    if constexpr (kParts == 1) return _mm512_permutexvar_epi8(index, table[0]);
    return _mm512_permutex2var_epi8(table[0], index, table[kParts - 1]);
  }
  __m512i upper_[kParts], lower_[kParts];
};

// Integers of 8 bits need no table and no shift. A code in the lowest byte of a word is inserted into the fp32 number
// 2^23, whose lowest bit has the value 1. A code in the second byte is inserted into 2^15, whose ninth bit has the
// value 1. A subtraction then gives the value of the code, which bf16 represents exactly.
template <>
class BytePairs<Codes::byte> {
 public:
  [[gnu::always_inline]] explicit BytePairs(const float* values)
      : even_start_(_mm512_set1_ps(0x1p23F - values[0])), odd_start_(_mm512_set1_ps(0x1p15F - values[0])) {}
  [[gnu::always_inline]] void pairs(__m512i word, __m512i& even, __m512i& odd) const {
    const __m512i upper = _mm512_srli_epi32(word, 16);
    even = joined(value(word, 0xFF, 0x4B000000, even_start_), value(upper, 0xFF, 0x4B000000, even_start_));
    odd = joined(value(word, 0xFF00, 0x47000000, odd_start_), value(upper, 0xFF00, 0x47000000, odd_start_));
  }

 private:
  [[gnu::always_inline]] static __m512i value(__m512i word, int mask, int number, __m512 start) {
    constexpr int kAOrBAndC = 0xF8;
    const __m512i bits = _mm512_ternarylogic_epi32(_mm512_set1_epi32(number), word, _mm512_set1_epi32(mask), kAOrBAndC);
    return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(bits), start));
  }
  [[gnu::always_inline]] static __m512i joined(__m512i first, __m512i second) {
    return _mm512_or_si512(_mm512_srli_epi32(first, 16), second);
  }
  __m512 even_start_, odd_start_;
};
#endif

// The range of activations for the bf16 instructions, which flush subnormal products and sums (below 2^-126). Nonzero
// codes are at least 2^-6 and activations at least 2^-96, so a product is at least 2^-102. A flushed value is therefore
// less than 2^-24 of the smallest product. E4M3 codes are at least 2^-9, so there a flushed value is less than 2^-21 of
// the smallest product.
constexpr uint32_t kMinActivation = (127U - 96U) << 23;
constexpr uint32_t kActivationEnd = (127U + 120U) << 23;

}  // namespace

}  // namespace marlin::cpu
