// The staged kernels whose threadgroups compute 128 x 64 outputs, in steps of 16 k.
#include "kernels/gemm/staged.h"

using namespace metal;
using namespace marlin;

MARLIN_STAGED_KERNELS(128, 64, 16)
MARLIN_FUNCTIONS(MARLIN_STAGED_ROWS(128, 64, 16, MARLIN_INSTANTIATE))
