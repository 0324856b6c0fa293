// One row of fp32 activations times E4M3 codes, for vector policies V that have a NormalE4M3.
#pragma once

#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/kernels/segments.h"
#include "csrc/cpu/unroll.h"

namespace marlin::cpu {

// Only zeros, subnormal codes and NaNs need V's decoder, whose shuffles and conversions keep the ports of the wide
// instructions busy. They are rare in a weight whose scales are its groups' largest magnitudes: in normally distributed
// groups of 128, one of 13,000 codes. Other codes are shifted and masked where they lie. Both ways give the same values
// and add them in the same order.
template <class V, int C>
void e4m3_row(const Step& s) {
  using F = typename V::F;
  using Normal = typename V::NormalE4M3;
  const typename V::template Decoder<Codes::e4m3> decoder(s.values);
  static_assert(Normal::unit == decoder.unit);
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const float* x = static_cast<const float*>(s.x);
  add_chunk<V, 1, C>(s, [&](int begin, int end, Accumulators<V, 1, C>& acc) __attribute__((always_inline)) {
    unroll<V, C>([&](auto c) __attribute__((always_inline)) { acc[c] = V::zero(); });
    for (int k = begin; k < end; k += 4, x += 4, words += s.ld_words, ahead += s.ld_words) {
      for (int i = 0; i < C * V::width; i += 16)
        __builtin_prefetch(ahead + i);
      typename V::I word[C];
      unroll<V, C>([&](auto c) __attribute__((always_inline)) { word[c] = V::load_words(words + c * V::width); });
      const auto multiply = [&](auto value) __attribute__((always_inline)) {
        unroll<V, 4>([&](auto j) __attribute__((always_inline)) {
          const F activation = V::set1(x[j]);
          unroll<V, C>([&](auto c)
                           __attribute__((always_inline)) { acc[c] = V::fma(value(j, word[c]), activation, acc[c]); });
        });
      };
      if (Normal::all(word)) [[likely]] {
        multiply([&](auto j, typename V::I w) __attribute__((always_inline)) { return Normal::template value<j>(w); });
      } else {
        multiply([&](auto j, typename V::I w) __attribute__((always_inline)) { return decoder.template decode<j>(w); });
      }
    }
    unroll<V, C>([&](auto c) __attribute__((always_inline)) { acc[c] = V::mul(acc[c], V::set1(Normal::unit)); });
  });
}

}  // namespace marlin::cpu
