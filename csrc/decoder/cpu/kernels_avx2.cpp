// AVX2 instances of the layer operators' functions.
#include "csrc/decoder/cpu/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/target.h"

MARLIN_TARGET(MARLIN_AVX2)

#include "csrc/cpu/x86/vec_avx2.h"
#include "csrc/decoder/cpu/activation_kernel.h"

MARLIN_DECODER_FUNCTIONS(avx2_decoder_functions, Avx2)

MARLIN_TARGET_END

#endif
