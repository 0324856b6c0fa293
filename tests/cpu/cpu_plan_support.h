// Groups of kernels that the tests of plans and of kernels ask for.
#pragma once

#include "csrc/gemm/cpu/plan.h"

namespace marlin::cpu {

inline bool is_byte_split(Kernel kernel) {
  return kernel >= Kernel::byte_split_avx2 && kernel <= Kernel::byte_matrix;
}

}  // namespace marlin::cpu
