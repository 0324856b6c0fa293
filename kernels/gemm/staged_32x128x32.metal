// The staged kernels whose threadgroups compute 32 x 128 outputs, in steps of 32 k.
#include "kernels/gemm/staged.h"

using namespace metal;
using namespace marlin;

MARLIN_STAGED_KERNELS(32, 128, 32)
MARLIN_FUNCTIONS(MARLIN_STAGED_ROWS(32, 128, 32, MARLIN_INSTANTIATE))
