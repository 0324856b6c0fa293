// NEON instances of the layer operators' functions.
#include "csrc/decoder/cpu/kernel_table.h"

#if defined(__aarch64__)

#include "csrc/cpu/arm/vec_neon.h"
#include "csrc/decoder/cpu/activation_kernel.h"
#include "csrc/decoder/cpu/row_kernels.h"

namespace marlin::cpu {

const DecoderFunctions* neon_decoder_functions() {
  static constexpr DecoderFunctions functions{&activate<Neon>, &sum_of_squares<Neon>, &add_rows<Neon>, &scale_row<Neon>,
                                              &rotate_row<Neon>};
  return &functions;
}

}  // namespace marlin::cpu

#endif
