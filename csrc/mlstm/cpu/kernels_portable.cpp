// Plain C++ instances of the mLSTM's fp32 kernels.
#include "csrc/cpu/portable/vec_portable.h"
#include "csrc/mlstm/cpu/vector_kernel.h"

MARLIN_MLSTM_KERNELS(portable_mlstm_kernels, Portable)
