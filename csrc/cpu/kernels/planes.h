// Joins the two planes of codes of 5 or 6 bits to bytes. Included after the ISA pragma.
#pragma once

#include <bit>

#include "csrc/cpu/kernels/kernel_table.h"

namespace marlin::cpu {

// The upper bits of a block of eight k of several columns.
template <class V>
struct HighWords {
  using Lanes [[gnu::vector_size(4 * V::width)]] = uint32_t;

  Lanes first;   // the field of k = 0 in byte 0, and of k = 4 in byte 2
  Lanes second;  // the field of k = 2 in byte 1, and of k = 6 in byte 3, as far up as those of `first`
  Lanes mask;    // of the fields of codes whose k is even, four bits further up

  // `k` is the block's first, counted from that of the plane.
  [[gnu::always_inline]] HighWords(const HighPlane& plane, int k, int column) {
    const uint32_t shift = high_shift(plane.bits, static_cast<uint32_t>(k) / kBlockK);
    first = std::bit_cast<Lanes>(V::load_words(plane.row(k) + column)) >> shift;
    second = first << (8 - plane.bits);
    mask = Lanes{} + ((1U << plane.bits) - 1) * 0x00100010U;
  }
  // Returns bytes whose upper bits are those of k = 0, 2, 4, 6, or with `odd` of k = 1, 3, 5, 7. `nibbles` are the
  // lower bits as bytes.
  template <int odd>
  [[gnu::always_inline]] typename V::I join(typename V::I nibbles) const {
    constexpr int kShift = odd ? 0 : 4;
    const Lanes upper = ((first << kShift) & mask) | ((second << kShift) & (mask << 8));
    return std::bit_cast<typename V::I>(std::bit_cast<Lanes>(nibbles) | upper);
  }
  // The same for a word of the first plane.
  template <int odd>
  [[gnu::always_inline]] typename V::I bytes(typename V::I word) const {
    const Lanes nibbles = (std::bit_cast<Lanes>(word) >> (4 * odd)) & 0x0F0F0F0FU;
    return join<odd>(std::bit_cast<typename V::I>(nibbles));
  }
};

}  // namespace marlin::cpu
