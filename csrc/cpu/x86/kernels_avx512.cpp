// AVX-512 instances of the fp32 kernels.
#include "kernel_set.h"

#if defined(__x86_64__)

#include "target.h"

MARLIN_TARGET(MARLIN_AVX512)

#include "gemm_kernel.h"
#include "vec_avx512.h"

namespace marlin::cpu {

namespace {
constexpr KernelSet kSet = kernel_set<Avx512>();
}

const KernelSet* avx512_kernels() {
  return &kSet;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#else

namespace marlin::cpu {
const KernelSet* avx512_kernels() {
  return nullptr;
}
}  // namespace marlin::cpu

#endif
