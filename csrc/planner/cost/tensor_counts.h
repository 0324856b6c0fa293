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
    KernelCounts{Kernel::gemm_tensor, WeightFormat::lut4, {32, 32, 32}, {159, 140, 64}, 132, 0, 477, 255, 7},
};

// With fp32 activations. bf16 has the same counts, because its decode is the same on a GPU with bfloat instructions,
// such as the M5. The M1 has none.
inline constexpr std::array kTensorFloat32Counts{
    KernelCounts{Kernel::gemm_tensor, WeightFormat::uint4b8, {32, 32, 32}, {133, 60, 64}, 132, 0, 436, 231, 4},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::uint4, {32, 32, 32}, {141, 76, 64}, 133, 0, 436, 255, 7},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::uint4_bias, {32, 32, 32}, {133, 60, 64}, 199, 0, 436, 255, 9},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::float4_e2m1, {32, 32, 32}, {141, 92, 64}, 132, 0, 436, 231, 4},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::nvfp4, {32, 32, 32}, {193, 112, 64}, 119, 0, 438, 255, 8},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::mxfp4, {32, 32, 32}, {143, 92, 64}, 148, 0, 436, 231, 4},
    KernelCounts{Kernel::gemm_tensor, WeightFormat::lut4, {32, 32, 32}, {236, 140, 64}, 189, 0, 447, 255, 7},
};

constexpr const KernelCounts& tensor_counts(WeightFormat format, ElementType activations) {
  const auto& table = activations == ElementType::float16 ? kTensorCounts : kTensorFloat32Counts;
  return *find_counts(table, Kernel::gemm_tensor, format, {kTensorRows, kTensorColumns, kTensorK});
}

}  // namespace marlin
