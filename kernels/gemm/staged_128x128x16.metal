// 128 x 128 outputs of a threadgroup, 16 k at a step.
#include "kernels/gemm/staged.h"

using namespace metal;
using namespace marlin;

MARLIN_STAGED_KERNELS(128, 128, 16)
MARLIN_STAGED_ROWS(128, 128, 16, MARLIN_INSTANTIATE)
