// The kernel that a plan of the CPU names.
#pragma once

#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/gemm/cpu/plan.h"

namespace marlin::cpu {

inline const MatrixKernel& matrix_kernel(const CpuPlan& plan, const KernelSet& kernels) {
  switch (plan.kernel) {
    case CpuKernel::bf16_dot_fp32_row:
      return bf16_dot_kernels()->fp32_row;
    case CpuKernel::bf16_dot_small_m:
      return bf16_dot_kernels()->small_m;
    case CpuKernel::bf16_dot:
      return bf16_dot_kernels()->large_m;
    case CpuKernel::bf16_dot_panel:
      return bf16_dot_kernels()->panel;
    case CpuKernel::bf16_dot_rounded:
      return bf16_dot_kernels()->rounded;
    case CpuKernel::byte_split_avx2:
      return avx2_byte_split_kernels()->small_m;
    case CpuKernel::byte_split_small_m:
      return byte_split_kernels()->small_m;
    case CpuKernel::byte_split:
      return byte_split_kernels()->large_m;
    case CpuKernel::byte_matrix:
      return *byte_matrix_kernel();
    case CpuKernel::int8_avx2_small_m:
      return avx2_byte_split_kernels()->int8_small_m;
    case CpuKernel::int8_avx2:
      return avx2_byte_split_kernels()->int8;
    case CpuKernel::int8_small_m:
      return byte_split_kernels()->int8_small_m;
    case CpuKernel::int8:
      return byte_split_kernels()->int8;
    case CpuKernel::amx:
      return amx_kernels(plan.parts)->exact;
    case CpuKernel::amx_scaled:
      return amx_kernels(plan.parts)->scaled;
    case CpuKernel::amx_table:
      return amx_kernels(plan.parts)->table;
    case CpuKernel::amx_rounded:
      return amx_kernels(plan.parts)->rounded;
    case CpuKernel::small_m:
      return kernels.small_m;
    default:
      return kernels.large_m;
  }
}

}  // namespace marlin::cpu
