// AVX-512 instances of the fp32 kernels.
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/target.h"

MARLIN_TARGET(MARLIN_AVX512)

#include "csrc/cpu/kernels/vector_kernel.h"
#include "csrc/cpu/x86/vec_avx512.h"

MARLIN_KERNEL_SET(avx512_kernels, Avx512)

MARLIN_TARGET_END

#endif
