// NEON instances of the mLSTM's fp32 kernels.
#include "csrc/mlstm/cpu/kernel_table.h"

#if defined(__aarch64__)

#include "csrc/cpu/arm/vec_neon.h"
#include "csrc/mlstm/cpu/vector_kernel.h"

MARLIN_MLSTM_KERNELS(neon_mlstm_kernels, Neon)

#endif
