// One row of fp32 activations times E4M3 codes, for vector policies V that have an E4M3Pairs. Codes are decoded where
// they lie: those of k = 0 and 2 in the 16-bit halves of a word, then those of k = 1 and 3. A vector of fp32 values
// therefore has two k of half the columns, and each column two sums, which are added at the end of a segment.
#pragma once

#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/kernels/segments.h"
#include "csrc/cpu/unroll.h"

namespace marlin::cpu {

// The halves pass through memory, because the conversion to fp32 from registers takes shuffles, of which Intel's cores
// execute one in a cycle. NaNs are decoded as 480. If the largest magnitude of a column is NaN, so is its sum.
template <class V, int C>
void e4m3_row(const Step& s) {
  using F = typename V::F;
  using I = typename V::I;
  using Pairs = typename V::E4M3Pairs;
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const float* x = static_cast<const float*>(s.x);
  add_chunk<V, 1, C>(s, [&](int begin, int end, Accumulators<V, 1, C>& acc) __attribute__((always_inline)) {
    F lower[C], upper[C];  // [column, 2 k]
    I largest[C];
    unroll<V, C>([&](auto c) __attribute__((always_inline)) {
      lower[c] = upper[c] = V::zero();
      largest[c] = I{};
    });
    for (int k = begin; k < end; k += 4, x += 4, words += s.ld_words, ahead += s.ld_words) {
      const F even = Pairs::template activations<0>(x), odd = Pairs::template activations<1>(x);
      for (int i = 0; i < C * V::width; i += 16)
        __builtin_prefetch(ahead + i, 0, 2);
      unroll<V, C>([&](auto c) __attribute__((always_inline)) {
        alignas(64) uint16_t halves[2][2 * V::width];
        const I word = V::load_words(words + c * V::width);
        largest[c] = Pairs::larger_magnitudes(largest[c], word);
        V::store_words(reinterpret_cast<uint32_t*>(halves[0]), Pairs::even(word));
        V::store_words(reinterpret_cast<uint32_t*>(halves[1]), Pairs::odd(word));
        asm("" : "+m"(halves));  // the compiler must not replace the memory by shuffles
        lower[c] = V::fma(V::load_half(halves[0]), even, lower[c]);
        upper[c] = V::fma(V::load_half(halves[0] + V::width), even, upper[c]);
        lower[c] = V::fma(V::load_half(halves[1]), odd, lower[c]);
        upper[c] = V::fma(V::load_half(halves[1] + V::width), odd, upper[c]);
      });
    }
    unroll<V, C>([&](auto c) __attribute__((always_inline)) {
      const F sum = V::mul(Pairs::columns(lower[c], upper[c]), V::set1(Pairs::unit));
      acc[c] = Pairs::nan_where_largest(largest[c], sum);
    });
  });
}

}  // namespace marlin::cpu
