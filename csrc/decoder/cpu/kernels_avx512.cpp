// AVX-512 instances of the layer operators' functions.
#include "csrc/decoder/cpu/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/x86/target.h"

MARLIN_TARGET(MARLIN_AVX512)

#include "csrc/cpu/x86/vec_avx512.h"
#include "csrc/decoder/cpu/activation_kernel.h"
#include "csrc/decoder/cpu/row_kernels.h"

namespace marlin::cpu {

const DecoderFunctions* avx512_decoder_functions() {
  static constexpr DecoderFunctions functions{&activate<Avx512>, &sum_of_squares<Avx512>, &add_rows<Avx512>,
                                              &scale_row<Avx512>, &rotate_row<Avx512>};
  return &functions;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
