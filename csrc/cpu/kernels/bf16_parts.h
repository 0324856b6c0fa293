// Splits activations into sums of bf16 terms ("parts") and makes tables of codes in bf16, for the kernels that multiply
// in bf16. Included after the ISA pragma, so everything here has internal linkage.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "csrc/cpu/kernels/kernel_table.h"

namespace marlin::cpu {

namespace {

#if defined(__x86_64__)
// Makes the table for vpermw, which looks up each 16-bit half of a lane. If a word is shifted right by 4j bits, nibble
// j lies at the bottom of its low half and nibble j + 4 at the bottom of its high half. One look-up then gives the bf16
// values of both codes. vpermw reads five index bits. The fifth belongs to the next nibble, so the table holds all 16
// entries twice.
[[gnu::always_inline]] inline __m512i bf16_table(__m512i upper_halves) {
  return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(upper_halves, 16)));
}
#endif

// The smallest and the largest activation for the bf16 instructions, which flush subnormal products and sums (below
// 2^-126). Non-zero codes are at least 2^-6 and activations at least 2^-96, so a product is at least 2^-102. A flushed
// value is therefore less than 2^-24 of the smallest product.
constexpr uint32_t kMinActivation = (127U - 96U) << 23;
constexpr uint32_t kActivationEnd = (127U + 120U) << 23;

// Splits each values[k] into bf16 terms, bits[0][k], bits[1][k] and so on, that add up to it. The sum is exact if
// values[k] has at most 8 * parts significant bits. Returns false if a value is too small for the instructions, or so
// large that a part could overflow.
template <int parts>
bool split_bf16(const float* values, int count, uint16_t (&bits)[parts][kChunk]) {
  uint32_t out_of_range = 0;
  for (int k = 0; k < count; ++k) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(values[k]) & 0x7FFFFFFFU;
    out_of_range |= static_cast<uint32_t>(magnitude != 0) &
                    static_cast<uint32_t>(magnitude - kMinActivation >= kActivationEnd - kMinActivation);
    float rest = values[k];
    for (int part = 0; part < parts; ++part) {
      bits[part][k] = float_to_bfloat16(rest);
      rest -= bfloat16_to_float(bits[part][k]);
    }
  }
  return out_of_range == 0;
}

}  // namespace

}  // namespace marlin::cpu
