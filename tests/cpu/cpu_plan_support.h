// Groups of kernels for the tests of plans and of kernels.
#pragma once

#include "csrc/gemm/cpu/plan.h"

namespace marlin::cpu {

inline bool is_byte_split(CpuKernel kernel) {
  return kernel >= CpuKernel::byte_split_avx2 && kernel <= CpuKernel::byte_matrix;
}

inline bool rounds(CpuKernel kernel) {
  return kernel == CpuKernel::bf16_dot_rounded || kernel == CpuKernel::amx_rounded;
}

inline bool is_int8(CpuKernel kernel) {
  return kernel >= CpuKernel::int8_avx2_small_m && kernel <= CpuKernel::int8;
}

}  // namespace marlin::cpu
