// NEON instances of the layer operators' functions.
#include "csrc/layer/cpu/layer_table.h"

#if defined(__aarch64__)

#include "csrc/cpu/arm/vec_neon.h"
#include "csrc/layer/cpu/activation_kernel.h"
#include "csrc/layer/cpu/row_kernels.h"

namespace marlin::cpu {

const LayerFunctions* neon_layer() {
  static constexpr LayerFunctions functions{&activate<Neon>, &sum_of_squares<Neon>, &add_rows<Neon>, &scale_row<Neon>,
                                            &rotate_row<Neon>};
  return &functions;
}

}  // namespace marlin::cpu

#endif
