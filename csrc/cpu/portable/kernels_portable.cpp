// Plain C++ instances of the fp32 kernels.
#include "csrc/cpu/gemm/vector_kernel.h"
#include "csrc/cpu/portable/vec_portable.h"

MARLIN_KERNEL_SET(portable_kernels, Portable)
