// AVX-512 instances of the layer operators' functions.
#include "csrc/decoder/cpu/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/target.h"

MARLIN_TARGET(MARLIN_AVX512)

#include "csrc/cpu/x86/vec_avx512.h"
#include "csrc/decoder/cpu/activation_kernel.h"

MARLIN_DECODER_FUNCTIONS(avx512_decoder_functions, Avx512)

MARLIN_TARGET_END

#endif
