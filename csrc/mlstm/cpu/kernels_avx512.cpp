// AVX-512 instances of the mLSTM's fp32 kernels.
#include "csrc/mlstm/cpu/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/target.h"

MARLIN_TARGET(MARLIN_AVX512)

#include "csrc/cpu/x86/vec_avx512.h"
#include "csrc/mlstm/cpu/vector_kernel.h"

MARLIN_MLSTM_KERNELS(avx512_mlstm_kernels, Avx512)

MARLIN_TARGET_END

#endif
