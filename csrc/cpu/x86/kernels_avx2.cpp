// AVX2 instances of the fp32 kernels.
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/target.h"

MARLIN_TARGET(MARLIN_AVX2)

#include "csrc/cpu/kernels/vector_kernel.h"
#include "csrc/cpu/x86/vec_avx2.h"

MARLIN_KERNEL_SET(avx2_kernels, Avx2)

MARLIN_TARGET_END

#endif
