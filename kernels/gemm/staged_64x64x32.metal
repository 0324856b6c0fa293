// The staged kernels whose threadgroups compute 64 x 64 outputs, in steps of 32 k.
#include "kernels/gemm/staged.h"

using namespace metal;
using namespace marlin;

MARLIN_STAGED_KERNELS(64, 64, 32)
MARLIN_FUNCTIONS(MARLIN_STAGED_ROWS(64, 64, 32, MARLIN_INSTANTIATE))
