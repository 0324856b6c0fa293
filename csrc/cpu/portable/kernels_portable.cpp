// Plain C++ instances of the fp32 kernels.
#include "csrc/cpu/kernels/vector_kernel.h"
#include "csrc/cpu/portable/vec_portable.h"

MARLIN_KERNEL_SET(portable_kernels, Portable)
