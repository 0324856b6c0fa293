// What a simdgroup of each kernel executes: instructions that the tool behind benchmarks/metal/instructions.py counted
// in code for the M1's GPU (-O1; fp16 activations, aligned tensors, no options). Counts are static: what only some
// steps do, such as the ends of groups in the staged kernels, is counted in every one.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "plan.h"

namespace marlin {

// issue: slots of a scheduler; complex: clocks of the integer and complex unit; matrix: 8x8x8 products.
struct InstructionCounts {
  uint32_t issue, complex, matrix;
};

// A simdgroup goes through `step` for every k step, and through `outer_issue` around them: every outer_k k, or where
// that is 0 at the end of every group or chain, or of every slice of a stripe.
struct KernelCounts {
  std::string_view kernel;
  WeightFormat format;  // stands for the formats with the same decode
  TileShape tile;
  InstructionCounts step;
  uint32_t outer_issue;
  uint32_t outer_k;
  uint32_t fixed_issue;  // outside all loops, once
  uint32_t half_registers;
};

inline constexpr std::array kKernelCounts{
    KernelCounts{"gemv", WeightFormat::uint4b8, {1, 128, 16}, {118, 32, 0}, 83, 0, 162, 95},
    KernelCounts{"gemv", WeightFormat::uint4b8, {2, 128, 16}, {197, 32, 0}, 131, 0, 199, 135},
    KernelCounts{"gemv", WeightFormat::uint4b8, {3, 128, 16}, {254, 32, 0}, 177, 0, 226, 179},
    KernelCounts{"gemv", WeightFormat::uint4b8, {4, 128, 16}, {321, 32, 0}, 221, 0, 259, 207},
    KernelCounts{"gemv", WeightFormat::float4_e2m1, {1, 128, 16}, {232, 96, 0}, 55, 0, 162, 103},
    KernelCounts{"gemv", WeightFormat::float4_e2m1, {2, 128, 16}, {297, 96, 0}, 69, 0, 199, 127},
    KernelCounts{"gemv", WeightFormat::float4_e2m1, {3, 128, 16}, {364, 96, 0}, 85, 0, 226, 143},
    KernelCounts{"gemv", WeightFormat::float4_e2m1, {4, 128, 16}, {431, 96, 0}, 101, 0, 259, 167},
    KernelCounts{"gemv", WeightFormat::lut4, {1, 128, 16}, {280, 192, 0}, 51, 0, 170, 135},
    KernelCounts{"gemv", WeightFormat::lut4, {2, 128, 16}, {345, 192, 0}, 61, 0, 207, 159},
    KernelCounts{"gemv", WeightFormat::lut4, {3, 128, 16}, {412, 192, 0}, 73, 0, 234, 175},
    KernelCounts{"gemv", WeightFormat::lut4, {4, 128, 16}, {479, 192, 0}, 85, 0, 267, 199},
    KernelCounts{"gemm_fused", WeightFormat::uint4b8, {8, 32, 64}, {166, 36, 32}, 74, 256, 204, 123},
    KernelCounts{"gemm_fused", WeightFormat::uint4b8, {16, 32, 64}, {194, 36, 64}, 102, 256, 214, 155},
    KernelCounts{"gemm_fused", WeightFormat::uint4b8, {24, 32, 64}, {234, 36, 96}, 138, 256, 217, 183},
    KernelCounts{"gemm_fused", WeightFormat::uint4b8, {32, 32, 64}, {294, 36, 128}, 172, 256, 222, 207},
    KernelCounts{"gemm_fused", WeightFormat::float4_e2m1, {8, 32, 64}, {268, 100, 32}, 72, 256, 204, 111},
    KernelCounts{"gemm_fused", WeightFormat::float4_e2m1, {16, 32, 64}, {326, 100, 64}, 106, 256, 214, 143},
    KernelCounts{"gemm_fused", WeightFormat::float4_e2m1, {24, 32, 64}, {322, 100, 96}, 128, 256, 217, 183},
    KernelCounts{"gemm_fused", WeightFormat::float4_e2m1, {32, 32, 64}, {383, 100, 128}, 170, 256, 222, 207},
    KernelCounts{"gemm_fused", WeightFormat::lut4, {8, 32, 64}, {480, 196, 32}, 72, 256, 217, 159},
    KernelCounts{"gemm_fused", WeightFormat::lut4, {16, 32, 64}, {492, 196, 64}, 110, 256, 227, 183},
    KernelCounts{"gemm_fused", WeightFormat::lut4, {24, 32, 64}, {496, 196, 96}, 130, 256, 230, 227},
    KernelCounts{"gemm_fused", WeightFormat::lut4, {32, 32, 64}, {540, 196, 128}, 170, 256, 235, 255},
    KernelCounts{"gemm_double_buffered_64x64x32", WeightFormat::uint4b8, {64, 64, 32}, {452, 80, 32}, 0, 0, 485, 159},
    KernelCounts{"gemm_single_stage_64x64x32", WeightFormat::uint4b8, {64, 64, 32}, {473, 96, 32}, 0, 0, 352, 127},
    KernelCounts{"gemm_striped_64x64x32", WeightFormat::uint4b8, {64, 64, 32}, {449, 80, 32}, 518, 0, 30, 175},
    KernelCounts{
        "gemm_double_buffered_32x128x32", WeightFormat::uint4b8, {32, 128, 32}, {532, 108, 32}, 0, 0, 568, 165},
    KernelCounts{"gemm_single_stage_32x128x32", WeightFormat::uint4b8, {32, 128, 32}, {574, 124, 32}, 0, 0, 352, 127},
    KernelCounts{"gemm_striped_32x128x32", WeightFormat::uint4b8, {32, 128, 32}, {519, 108, 32}, 586, 0, 30, 179},
    KernelCounts{"gemm_double_buffered_128x64x16", WeightFormat::uint4b8, {128, 64, 16}, {362, 84, 32}, 0, 0, 753, 211},
    KernelCounts{"gemm_single_stage_128x64x16", WeightFormat::uint4b8, {128, 64, 16}, {382, 100, 32}, 0, 0, 626, 191},
    KernelCounts{
        "gemm_double_buffered_128x128x16", WeightFormat::uint4b8, {128, 128, 16}, {385, 92, 32}, 0, 0, 770, 207},
    KernelCounts{"gemm_single_stage_128x128x16", WeightFormat::uint4b8, {128, 128, 16}, {398, 104, 32}, 0, 0, 626, 191},
    KernelCounts{
        "gemm_double_buffered_64x64x32", WeightFormat::float4_e2m1, {64, 64, 32}, {462, 96, 32}, 0, 0, 495, 159},
    KernelCounts{"gemm_single_stage_64x64x32", WeightFormat::float4_e2m1, {64, 64, 32}, {483, 112, 32}, 0, 0, 352, 127},
    KernelCounts{"gemm_striped_64x64x32", WeightFormat::float4_e2m1, {64, 64, 32}, {459, 96, 32}, 528, 0, 30, 175},
    KernelCounts{
        "gemm_double_buffered_32x128x32", WeightFormat::float4_e2m1, {32, 128, 32}, {551, 140, 32}, 0, 0, 586, 163},
    KernelCounts{
        "gemm_single_stage_32x128x32", WeightFormat::float4_e2m1, {32, 128, 32}, {575, 156, 32}, 0, 0, 352, 127},
    KernelCounts{"gemm_striped_32x128x32", WeightFormat::float4_e2m1, {32, 128, 32}, {539, 140, 32}, 606, 0, 30, 179},
    KernelCounts{
        "gemm_double_buffered_128x64x16", WeightFormat::float4_e2m1, {128, 64, 16}, {372, 100, 32}, 0, 0, 763, 211},
    KernelCounts{
        "gemm_single_stage_128x64x16", WeightFormat::float4_e2m1, {128, 64, 16}, {392, 116, 32}, 0, 0, 626, 191},
    KernelCounts{
        "gemm_double_buffered_128x128x16", WeightFormat::float4_e2m1, {128, 128, 16}, {395, 108, 32}, 0, 0, 780, 207},
    KernelCounts{
        "gemm_single_stage_128x128x16", WeightFormat::float4_e2m1, {128, 128, 16}, {408, 120, 32}, 0, 0, 626, 191},
    KernelCounts{"gemm_double_buffered_64x64x32", WeightFormat::lut4, {64, 64, 32}, {560, 144, 32}, 0, 0, 498, 171},
    KernelCounts{"gemm_single_stage_64x64x32", WeightFormat::lut4, {64, 64, 32}, {586, 156, 32}, 0, 0, 367, 135},
    KernelCounts{"gemm_striped_64x64x32", WeightFormat::lut4, {64, 64, 32}, {573, 144, 32}, 517, 0, 45, 183},
    KernelCounts{"gemm_double_buffered_32x128x32", WeightFormat::lut4, {32, 128, 32}, {647, 172, 32}, 0, 0, 582, 179},
    KernelCounts{"gemm_single_stage_32x128x32", WeightFormat::lut4, {32, 128, 32}, {669, 184, 32}, 0, 0, 367, 135},
    KernelCounts{"gemm_striped_32x128x32", WeightFormat::lut4, {32, 128, 32}, {634, 172, 32}, 585, 0, 45, 191},
    KernelCounts{"gemm_double_buffered_128x64x16", WeightFormat::lut4, {128, 64, 16}, {461, 148, 32}, 0, 0, 767, 227},
    KernelCounts{"gemm_single_stage_128x64x16", WeightFormat::lut4, {128, 64, 16}, {478, 160, 32}, 0, 0, 641, 203},
    KernelCounts{"gemm_single_stage_128x128x16", WeightFormat::lut4, {128, 128, 16}, {494, 164, 32}, 0, 0, 641, 203},
    // The tool cannot compile this one: single_stage stands in.
    KernelCounts{"gemm_double_buffered_128x128x16", WeightFormat::lut4, {128, 128, 16}, {494, 164, 32}, 0, 0, 641, 207},
};

// The format whose decode was counted for this one.
constexpr WeightFormat counted_format(WeightFormat format) {
  switch (format) {
    case WeightFormat::uint4b8:
    case WeightFormat::uint4:
    case WeightFormat::uint4_bias:
      return WeightFormat::uint4b8;
    case WeightFormat::lut4:
      return WeightFormat::lut4;
    default:
      return WeightFormat::float4_e2m1;
  }
}

// Null where that kernel has not been counted.
constexpr const KernelCounts* find_counts(std::string_view kernel, WeightFormat format, const TileShape& tile) {
  for (const KernelCounts& row : kKernelCounts) {
    if (row.kernel == kernel && row.format == counted_format(format) && row.tile == tile) return &row;
  }
  return nullptr;
}

}  // namespace marlin
