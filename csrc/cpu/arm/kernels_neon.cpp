// NEON instances of the fp32 kernels.
#include "csrc/cpu/gemm/kernel_table.h"

#if defined(__aarch64__)

#include "csrc/cpu/arm/vec_neon.h"
#include "csrc/cpu/gemm/vector_kernel.h"

MARLIN_KERNEL_SET(neon_kernels, Neon)

#endif
