// A loop whose index is a compile-time constant.
#pragma once

#include <type_traits>
#include <utility>

namespace marlin::cpu {

// Calls f with 0 to count - 1. An ordinary loop is not enough: GCC 12 keeps an array of vectors in registers only if
// every index is a constant. The type V gives instances for different instruction sets different symbols.
template <class V, int count, class F>
[[gnu::always_inline]] inline void unroll(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, count>{});
}

}  // namespace marlin::cpu
