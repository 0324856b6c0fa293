// Joins the two planes of codes of 5 or 6 bits to bytes. Include this file after the ISA pragma.
#pragma once

#include "csrc/cpu/kernels/kernel_table.h"

namespace marlin::cpu {

// The upper bits of a block of eight k in several columns.
template <class V>
struct HighWords {
  using Lanes [[gnu::vector_size(4 * V::width)]] = uint32_t;

  Lanes first;   // the field of k = 0 in byte 0, and of k = 4 in byte 2
  Lanes second;  // the field of k = 2 in byte 1, and of k = 6 in byte 3, at the same bit of the byte as in `first`
  Lanes mask;    // selects the fields of even k after a shift by four bits

  // `k` is the block's first k, counted from the plane's first k.
  [[gnu::always_inline]] HighWords(const HighPlane& plane, int k, int column) {
    const uint32_t shift = high_shift(plane.bits, static_cast<uint32_t>(k) / kBlockK);
    first = __builtin_bit_cast(Lanes, V::load_words(plane.row(k) + column)) >> shift;
    second = first << (8 - plane.bits);
    mask = Lanes{} + ((1U << plane.bits) - 1) * 0x00100010U;
  }
  // Returns the bytes of the even k of a word, or of its odd k if `odd` is 1. std::bit_cast cannot replace
  // __builtin_bit_cast here: std::bit_cast is a function that is compiled for the baseline, where functions return
  // vectors in another way.
  template <int odd>
  [[gnu::always_inline]] typename V::I bytes(typename V::I word) const {
    constexpr int kShift = odd ? 0 : 4;
    const Lanes nibbles = (__builtin_bit_cast(Lanes, word) >> (4 * odd)) & 0x0F0F0F0FU;
    const Lanes upper = ((first << kShift) & mask) | ((second << kShift) & (mask << 8));
    return __builtin_bit_cast(typename V::I, nibbles | upper);
  }
};

}  // namespace marlin::cpu
