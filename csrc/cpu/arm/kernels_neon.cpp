// NEON instances of the fp32 kernels.
#include "kernel_set.h"

#if defined(__aarch64__)

#include "gemm_kernel.h"
#include "vec_neon.h"

namespace marlin::cpu {

const KernelSet* neon_kernels() {
  static constexpr KernelSet kSet = kernel_set<Neon>();
  return &kSet;
}

}  // namespace marlin::cpu

#else

namespace marlin::cpu {
const KernelSet* neon_kernels() {
  return nullptr;
}
}  // namespace marlin::cpu

#endif
