// A loop whose index is a compile-time constant.
#pragma once

#include <type_traits>
#include <utility>

namespace marlin::cpu {

// Calls f with 0 to count - 1. GCC 12 keeps an array of vectors in registers only if every index is a constant, which
// an ordinary loop does not guarantee. The type V gives different symbols to the instances for different instruction
// sets.
template <class V, int count, class F>
[[gnu::always_inline]] inline void unroll(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, count>{});
}

}  // namespace marlin::cpu
