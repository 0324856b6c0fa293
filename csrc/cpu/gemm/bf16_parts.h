// Activations as sums of bf16 parts and codes as bf16 tables, for the kernels that multiply in bf16. Included after the
// ISA pragma, by those files only; everything here has internal linkage.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernel_set.h"

namespace marlin::cpu {

namespace {

#if defined(__x86_64__)
// Nibbles j and j + 4 of a word stand at the bottom of the two halves of each 32-bit lane once the word is shifted by
// 4j: vpermw, which reads five index bits, turns them into two bf16 through a table that is written twice.
[[gnu::always_inline]] inline __m512i bf16_table(__m512i upper_halves) {
  return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(upper_halves, 16)));
}
#endif

// The bf16 instructions flush subnormal products and sums. Beside codes from 2^-6 on that is 2^-24 of the least
// product.
constexpr uint32_t kLeastActivation = (127U - 96U) << 23;
constexpr uint32_t kBeyondActivations = (127U + 120U) << 23;

// values[k] = sum over parts of bits[part][k], exactly where 8 bits a part suffice. False where one is too
// small for the instructions, or a part could overflow.
template <int parts>
bool split_bf16(const float* values, int count, uint16_t (&bits)[parts][kChunk]) {
  uint32_t strange = 0;
  for (int k = 0; k < count; ++k) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(values[k]) & 0x7FFFFFFFU;
    strange |= static_cast<uint32_t>(magnitude != 0) &
               static_cast<uint32_t>(magnitude - kLeastActivation >= kBeyondActivations - kLeastActivation);
    float rest = values[k];
    for (int part = 0; part < parts; ++part) {
      bits[part][k] = float_to_bfloat16(rest);
      rest -= bfloat16_to_float(bits[part][k]);
    }
  }
  return strange == 0;
}

}  // namespace

}  // namespace marlin::cpu
