// Plain C++ instances of the layer operators' functions.
#include "csrc/cpu/portable/vec_portable.h"
#include "csrc/decoder/cpu/activation_kernel.h"
#include "csrc/decoder/cpu/row_kernels.h"

namespace marlin::cpu {

const DecoderFunctions* portable_decoder_functions() {
  static constexpr DecoderFunctions functions{&activate<Portable>, &sum_of_squares<Portable>, &add_rows<Portable>,
                                              &scale_row<Portable>, &rotate_row<Portable>};
  return &functions;
}

}  // namespace marlin::cpu
