// The table of weight formats: what a 4-bit code means, how scales are coded, and which tensors a format takes. The
// argument checks, the Python package and the docs all use it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "csrc/core/math.h"
#include "kernels/shared/types.h"

namespace marlin {

enum class ScaleCoding : int32_t {
  floating,  // fp16, bf16 or fp32 values
  e4m3,      // uint8 codes, OCP E4M3, sign honoured, 0x7F and 0xFF are NaN
  e8m0,      // uint8 codes, 2^(code - 127), 0xFF is NaN
};

enum class ZerosRole : int32_t {
  none,
  zero_point,  // w = (q - z) * s; uint8 codes or floating values
  bias,        // w = q * s + b; floating values
};

struct WeightFormatInfo {
  WeightFormat format;
  std::string_view name;
  std::string_view formula;
  ScaleCoding scale_coding;
  ZerosRole zeros_role;
  bool has_global_scale;
  bool has_lut;
  int64_t fixed_group_size;  // 0 if any of kGroupSizes, or K, is allowed
};

inline constexpr std::array<WeightFormatInfo, kWeightFormatCount> kWeightFormats{{
    {WeightFormat::uint4b8, "uint4b8", "(q - 8) * s", ScaleCoding::floating, ZerosRole::none, false, false, 0},
    {WeightFormat::uint4, "uint4", "(q - z) * s", ScaleCoding::floating, ZerosRole::zero_point, false, false, 0},
    {WeightFormat::uint4_bias, "uint4_bias", "q * s + b", ScaleCoding::floating, ZerosRole::bias, false, false, 0},
    {WeightFormat::float4_e2m1, "float4_e2m1", "e2m1(q) * s", ScaleCoding::floating, ZerosRole::none, false, false, 0},
    {WeightFormat::nvfp4, "nvfp4", "e2m1(q) * (e4m3(s) * global_scale)", ScaleCoding::e4m3, ZerosRole::none, true,
     false, 16},
    {WeightFormat::mxfp4, "mxfp4", "e2m1(q) * 2^(s - 127)", ScaleCoding::e8m0, ZerosRole::none, false, false, 32},
    {WeightFormat::lut4, "lut4", "lut[q] * s", ScaleCoding::floating, ZerosRole::none, false, true, 0},
}};

inline constexpr std::array<int64_t, 5> kGroupSizes{16, 32, 64, 128, 256};

constexpr const WeightFormatInfo& info(WeightFormat format) {
  return kWeightFormats[static_cast<size_t>(format)];
}

// The E2M1 value of each code: sign, two exponent bits (bias 1), one mantissa bit (OCP MX v1.0, 5.3.3).
inline constexpr std::array<float, 16> kE2M1Values{0.F,  0.5F,  1.F,  1.5F,  2.F,  3.F,  4.F,  6.F,
                                                   -0.F, -0.5F, -1.F, -1.5F, -2.F, -3.F, -4.F, -6.F};

constexpr int64_t group_count(int64_t K, int64_t group_size) {
  return ceil_divide(K, group_size);
}

}  // namespace marlin
