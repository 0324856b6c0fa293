// AVX-512 instances of the fp32 kernels. Everything after the pragma is compiled for the wider machine and is called
// only after capability() has found it.
#include <algorithm>
#include <utility>

#include "kernel_set.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
// GCC 12 warns about the undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

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

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace marlin::cpu {
const KernelSet* avx512_kernels() {
  return nullptr;
}
}  // namespace marlin::cpu

#endif
