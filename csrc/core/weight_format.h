// Lists of the weight formats of kernels/shared/types.h, and properties of formats that only host code needs.
#pragma once

#include <array>
#include <cstdint>

#include "csrc/core/math.h"
#include "kernels/shared/types.h"

namespace marlin {

inline constexpr auto kWeightFormats = [] {
  std::array<WeightFormat, kWeightFormatCount> formats{};
  for (size_t i = 0; i < formats.size(); ++i)
    formats[i] = static_cast<WeightFormat>(i);
  return formats;
}();

inline constexpr auto kGroupSizes = std::to_array<int64_t>({MARLIN_GROUP_SIZES});

// The E2M1 value of each code: sign, two exponent bits (bias 1), one mantissa bit (OCP MX v1.0, 5.3.3).
inline constexpr std::array<float, 16> kE2M1Values{0.F,  0.5F,  1.F,  1.5F,  2.F,  3.F,  4.F,  6.F,
                                                   -0.F, -0.5F, -1.F, -1.5F, -2.F, -3.F, -4.F, -6.F};

constexpr int64_t group_count(int64_t K, int64_t group_size) {
  return ceil_divide(K, group_size);
}

}  // namespace marlin
