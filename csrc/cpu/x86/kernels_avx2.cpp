// AVX2 instances of the fp32 kernels.
#include "kernel_set.h"

#if defined(__x86_64__)

#include "target.h"

MARLIN_TARGET(MARLIN_AVX2)

#include "gemm_kernel.h"
#include "vec_avx2.h"

namespace marlin::cpu {

namespace {
constexpr KernelSet kSet = kernel_set<Avx2>();
}

const KernelSet* avx2_kernels() {
  return &kSet;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#else

namespace marlin::cpu {
const KernelSet* avx2_kernels() {
  return nullptr;
}
}  // namespace marlin::cpu

#endif
