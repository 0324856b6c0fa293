// The loop over the segments of a chunk, for all matrix kernels. A kernel sums the products of a segment and then
// scales the sum once. Include this file after the ISA pragma. The template argument V, or the type of the body, gives
// different symbols to the instances for different instruction sets.
#pragma once

#include <type_traits>

#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/unroll.h"

namespace marlin::cpu {

// Calls body(segment, begin, end) for each segment of the step's chunk. The segment contains k = begin to end - 1.
template <class Body>
[[gnu::always_inline]] inline void for_each_segment(const Step& s, Body&& body) {
  for (int begin = 0, segment = 0; begin < s.k; begin += s.segment, ++segment)
    body(segment, begin, begin + s.segment < s.k ? begin + s.segment : s.k);
}

// The sums of R rows and C vectors of columns.
template <class V, int R, int C>
using Accumulators = typename V::F[R * C];

// Adds scale * sum(code * x), corrected by the zero point, to y [R, C vectors].
template <class V, int R, int C>
[[gnu::always_inline]] inline void add_segment(const Step& s, int segment, const Accumulators<V, R, C>& acc, float* y) {
  using F = typename V::F;
  const float* scales = s.scales + segment * s.ld_scales;
  const float* zeros = s.role == ZerosRole::none ? nullptr : s.zeros + segment * s.ld_scales;
  const float* sums = s.role == ZerosRole::none ? nullptr : s.sums + segment * s.ld_sums;
  auto each = [&](auto role) __attribute__((always_inline)) {
    unroll<V, C>([&](auto c) __attribute__((always_inline)) {
      const F scale = V::load(scales + c * V::width);
      F zero = V::zero();
      if constexpr (role != ZerosRole::none) zero = V::load(zeros + c * V::width);
      unroll<V, R>([&](auto i) __attribute__((always_inline)) {
        float* at = y + (i * C + c) * V::width;
        F a = acc[i * C + c];
        if constexpr (role == ZerosRole::zero_point) a = V::fnma(zero, V::set1(sums[i]), a);
        F sum = V::fma(a, scale, V::load(at));
        if constexpr (role == ZerosRole::bias) sum = V::fma(zero, V::set1(sums[i]), sum);
        V::store(at, sum);
      });
    });
  };
  switch (s.role) {
    case ZerosRole::none:
      return each(std::integral_constant<ZerosRole, ZerosRole::none>{});
    case ZerosRole::zero_point:
      return each(std::integral_constant<ZerosRole, ZerosRole::zero_point>{});
    case ZerosRole::bias:
      return each(std::integral_constant<ZerosRole, ZerosRole::bias>{});
  }
}

// Adds up the segments of a chunk. If a chunk has several segments, they are first added to a separate sum and not
// directly to y. With small groups and a long K, direct addition would be one chain of thousands of roundings.
template <class V, int R, int C>
class ChunkSum {
 public:
  [[gnu::always_inline]] explicit ChunkSum(const Step& s) : y_(s.y), single_(s.segment >= s.k) {
    if (single_) return;
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) { V::store(sum_ + i * V::width, V::zero()); });
  }
  [[gnu::always_inline]] float* target() { return single_ ? y_ : sum_; }
  [[gnu::always_inline]] void finish() {
    if (single_) return;
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) {
      V::store(y_ + i * V::width, V::add(V::load(y_ + i * V::width), V::load(sum_ + i * V::width)));
    });
  }

 private:
  float* y_;
  bool single_;
  alignas(64) float sum_[R * C * V::width];
};

// Adds the products of a chunk to y. sum(begin, end, acc) must set acc to the sum of the products of k = begin to end -
// 1, without scales.
template <class V, int R, int C, class Sum>
[[gnu::always_inline]] inline void add_chunk(const Step& s, Sum&& sum) {
  ChunkSum<V, R, C> chunk(s);
  for_each_segment(s, [&](int segment, int begin, int end) __attribute__((always_inline)) {
    Accumulators<V, R, C> acc;
    sum(begin, end, acc);
    add_segment<V, R, C>(s, segment, acc, chunk.target());
  });
  chunk.finish();
}

}  // namespace marlin::cpu
