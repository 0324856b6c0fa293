#include "csrc/cpu/kernels/kernel_table.h"

namespace marlin::cpu {

const KernelSet* kernels_of(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return avx2_kernels();
    case Isa::avx512:
    case Isa::amx:  // amx adds tiles to AVX-512, but has no tiles for these functions
      return avx512_kernels();
    case Isa::neon:
      return neon_kernels();
    default:
      return portable_kernels();
  }
}

// This build contains no code for the instruction sets below.
#if !defined(__x86_64__)
const KernelSet* avx2_kernels() {
  return nullptr;
}
const KernelSet* avx512_kernels() {
  return nullptr;
}
const ByteSplitKernels* avx2_byte_split_kernels() {
  return nullptr;
}
#endif
#if !defined(__aarch64__)
const KernelSet* neon_kernels() {
  return nullptr;
}
const MatrixKernel* byte_matrix_kernel() {
  return nullptr;
}
#endif
#if !defined(__x86_64__) && !defined(__aarch64__)
const Bf16DotKernels* bf16_dot_kernels() {
  return nullptr;
}
const ByteSplitKernels* byte_split_kernels() {
  return nullptr;
}
#endif
#if !defined(__x86_64__) || !defined(__linux__)
const AmxKernels* amx_kernels(int) {
  return nullptr;
}
#endif

}  // namespace marlin::cpu
