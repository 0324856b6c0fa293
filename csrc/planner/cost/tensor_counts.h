// What a simdgroup of gemm_tensor executes, for the cost model. No tool compiles for a GPU with tensor units, so these
// figures are assumed: decoding, loading and scaling are taken to cost what they cost in gemm_fused of 32 rows, whose
// step is twice as long.
#pragma once

#include "csrc/planner/cost/instruction_counts.h"

namespace marlin {

constexpr KernelCounts tensor_counts_like_fused(WeightFormat format) {
  const KernelCounts& fused =
      *find_counts(kKernelCounts, Kernel::gemm_fused, format, {kFusedMaxRows, kFusedColumns, kFusedK});
  constexpr uint32_t kRatio = uint32_t{kFusedK} / kTensorK;
  static_assert(uint32_t{kTensorRows} == kFusedMaxRows && uint32_t{kTensorColumns} == kFusedColumns);
  return {.kernel = Kernel::gemm_tensor,
          .format = format,
          .tile = {kTensorRows, kTensorColumns, kTensorK},
          .step = {fused.step.issue / kRatio, fused.step.complex / kRatio, fused.step.matrix / kRatio},
          .outer_issue = fused.outer_issue,
          .outer_k = 0,
          .fixed_issue = fused.fixed_issue,
          .half_registers = fused.half_registers};
}

inline constexpr std::array kTensorCounts{tensor_counts_like_fused(WeightFormat::uint4b8),
                                          tensor_counts_like_fused(WeightFormat::float4_e2m1),
                                          tensor_counts_like_fused(WeightFormat::lut4)};

// Returns the counts of a step of 32 rows, 32 columns and 32 k, which every tile has.
constexpr const KernelCounts& tensor_counts(WeightFormat format) {
  for (const KernelCounts& row : kTensorCounts) {
    if (code_kind(row.format) == code_kind(format)) return row;
  }
  return kTensorCounts.front();
}

}  // namespace marlin
