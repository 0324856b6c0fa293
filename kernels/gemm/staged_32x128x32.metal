// 32 x 128 outputs of a threadgroup, 32 k at a step.
#include "kernels/gemm/staged.h"

using namespace metal;
using namespace marlin;

MARLIN_STAGED_KERNELS(32, 128, 32)
MARLIN_STAGED_ROWS(32, 128, 32, MARLIN_INSTANTIATE)
