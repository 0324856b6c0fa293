// AVX2 instances of the layer operators' functions.
#include "csrc/decoder/cpu/kernel_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/x86/target.h"

MARLIN_TARGET(MARLIN_AVX2)

#include "csrc/cpu/x86/vec_avx2.h"
#include "csrc/decoder/cpu/activation_kernel.h"
#include "csrc/decoder/cpu/row_kernels.h"

namespace marlin::cpu {

const DecoderFunctions* avx2_decoder_functions() {
  static constexpr DecoderFunctions functions{&activate<Avx2>, &sum_of_squares<Avx2>, &add_rows<Avx2>, &scale_row<Avx2>,
                                              &rotate_row<Avx2>};
  return &functions;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
