// ceil_divide and round_up for 64-bit integers, for host code only. kernels/shared/types.h has them for 32 bits.
#pragma once

#include <concepts>
#include <type_traits>

#include "kernels/shared/types.h"

namespace marlin {

template <std::integral T>
  requires(sizeof(T) == 8)
constexpr T ceil_divide(T a, std::type_identity_t<T> b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

template <std::integral T>
  requires(sizeof(T) == 8)
constexpr T round_up(T value, std::type_identity_t<T> multiple) {
  return ceil_divide(value, multiple) * multiple;
}

}  // namespace marlin
