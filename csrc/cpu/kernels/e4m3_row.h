// One row of fp32 activations times E4M3 codes, for vector policies V that have E4M3Pairs.
#pragma once

#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/kernels/segments.h"
#include "csrc/cpu/unroll.h"

namespace marlin::cpu {

// Calls body() for k, k + 4, ... up to `end`, until it returns false. After each call, advances the addresses by a row
// of words. Returns the first k that is not done.
template <class V, int C, class Body>
[[gnu::always_inline]] inline int each_row(const Step& s, int k, int end, const uint32_t*& words,
                                           const uint32_t*& ahead, const float*& x, Body&& body) {
  for (; k < end; k += 4, x += 4, words += s.ld_words, ahead += s.ld_words) {
    if (!body()) break;
    for (int i = 0; i < C * V::width; i += 16)
      __builtin_prefetch(ahead + i);
  }
  return k;
}

// Multiplies in two ways. With AVX-512, each segment begins with the first way: a shift and a mask convert codes to
// fp32. This is correct only for normal numbers, so it ends at the first row of words that has a zero, a subnormal code
// or a NaN in this strip. In normally distributed groups of 128 with the largest magnitude as scale, one of 13,000
// codes is such a code. AVX2 has no instruction that masks and sets bits at once, so it uses only the second way.
//
// The second way converts codes through fp16: those of k = 0 and 2 in the 16-bit halves of a word, then those of k = 1
// and 3. A vector of fp32 values holds two k of half the columns, so each column has two sums. The fp16 values pass
// through memory, because their conversion in registers takes shuffles, of which Intel's cores execute only one per
// cycle. A NaN code is converted to 480. NaN is the code with the largest magnitude, so a column in which this
// magnitude occurs gets the sum NaN at the end.
template <class V, int C>
void e4m3_row(const Step& s) {
  using F = typename V::F;
  using I = typename V::I;
  using Pairs = typename V::E4M3Pairs;
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const float* x = static_cast<const float*>(s.x);
  add_chunk<V, 1, C>(s, [&](int begin, int end, Accumulators<V, 1, C>& acc) __attribute__((always_inline)) {
    unroll<V, C>([&](auto c) __attribute__((always_inline)) { acc[c] = V::zero(); });
    int k = begin;
    if constexpr (requires { typename V::NormalE4M3; }) {
      using Normal = typename V::NormalE4M3;
      static_assert(Normal::unit == Pairs::unit);
      k = each_row<V, C>(s, k, end, words, ahead, x, [&]() __attribute__((always_inline)) {
        I word[C];
        unroll<V, C>([&](auto c) __attribute__((always_inline)) { word[c] = V::load_words(words + c * V::width); });
        if (!Normal::all(word)) return false;
        unroll<V, 4>([&](auto j) __attribute__((always_inline)) {
          const F activation = V::set1(x[j]);
          unroll<V, C>([&](auto c) __attribute__((always_inline)) {
            acc[c] = V::fma(Normal::template value<j>(word[c]), activation, acc[c]);
          });
        });
        return true;
      });
    }
    if (k < end) {
      F lower[C], upper[C];  // [column, 2 k]
      I largest[C];
      unroll<V, C>([&](auto c) __attribute__((always_inline)) {
        lower[c] = upper[c] = V::zero();
        largest[c] = I{};
      });
      each_row<V, C>(s, k, end, words, ahead, x, [&]() __attribute__((always_inline)) {
        const F even = Pairs::template activations<0>(x), odd = Pairs::template activations<1>(x);
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
        return true;
      });
      unroll<V, C>([&](auto c) __attribute__((always_inline)) {
        acc[c] = Pairs::nan_where_largest(largest[c], V::add(acc[c], Pairs::columns(lower[c], upper[c])));
      });
    }
    unroll<V, C>([&](auto c) __attribute__((always_inline)) { acc[c] = V::mul(acc[c], V::set1(Pairs::unit)); });
  });
}

}  // namespace marlin::cpu
