// What a simdgroup of gemm_tensor executes around its matrix products. benchmarks/metal/tensor_instructions.py --write
// makes the tables.
// No tool compiles for a GPU with tensor units. The counts are of code for the M1's GPU in which other instructions
// replace each product and are subtracted again; the registers include those instructions.
#pragma once

#include "csrc/planner/cost/instruction_counts.h"

namespace marlin {

// With fp16 activations. The step is 32 rows, 32 columns and 32 k, which every tile has.
inline constexpr std::array kTensorCounts{
    KernelCounts{Kernel::gemm_tensor, WeightFormat::uint4b8, {32, 32, 32}, {112, 60, 64}, 136, 0, 468, 231, 4},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::uint4, {32, 32, 32}, {121, 76, 64}, 137, 0, 468, 231, 6},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::uint4_bias, {32, 32, 32}, {113, 60, 64}, 203, 0, 468, 253, 8},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::float4_e2m1, {32, 32, 32}, {135, 92, 64}, 132, 0, 468, 231, 4},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::nvfp4, {32, 32, 32}, {196, 112, 64}, 119, 0, 470, 231, 8},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::mxfp4, {32, 32, 32}, {136, 92, 64}, 148, 0, 468, 231, 4},
};

// With bfloat activations. The M1 has no bfloat instructions, so floats take their place in the counted code; the
// decode is the same on a GPU that has such instructions, as the M5 does.
inline constexpr std::array kTensorBfloatCounts{
    KernelCounts{Kernel::gemm_tensor, WeightFormat::uint4b8, {32, 32, 32}, {133, 60, 64}, 132, 0, 436, 231, 4},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::uint4, {32, 32, 32}, {141, 76, 64}, 133, 0, 436, 255, 7},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::uint4_bias, {32, 32, 32}, {133, 60, 64}, 199, 0, 436, 255, 9},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::float4_e2m1, {32, 32, 32}, {141, 92, 64}, 132, 0, 436, 231, 4},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::nvfp4, {32, 32, 32}, {193, 112, 64}, 119, 0, 438, 255, 8},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::mxfp4, {32, 32, 32}, {143, 92, 64}, 148, 0, 436, 231, 4},
};

// There are counts if has_tensor_kernel(format, activations).
constexpr const KernelCounts& tensor_counts(WeightFormat format, ElementType activations) {
  const auto& table = activations == ElementType::float16 ? kTensorCounts : kTensorBfloatCounts;
  return *find_counts(table, Kernel::gemm_tensor, format, {kTensorRows, kTensorColumns, kTensorK});
}

}  // namespace marlin
