#include "gemm_kernel.h"
#include "vec_portable.h"

namespace marlin::cpu {

const KernelSet* portable_kernels() {
  static constexpr KernelSet kSet = kernel_set<Portable>();
  return &kSet;
}

}  // namespace marlin::cpu
