// NEON instances of the layer operators' functions.
#include "csrc/decoder/cpu/kernel_table.h"

#if defined(__aarch64__)

#include "csrc/cpu/arm/vec_neon.h"
#include "csrc/decoder/cpu/activation_kernel.h"

MARLIN_DECODER_FUNCTIONS(neon_decoder_functions, Neon)

#endif
