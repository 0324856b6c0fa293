// NEON instances of the fp32 kernels.
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__aarch64__)

#include "csrc/cpu/arm/vec_neon.h"
#include "csrc/cpu/kernels/vector_kernel.h"

MARLIN_KERNEL_SET(neon_kernels, Neon)

#endif
