// AVX2 instances of the layer operators' functions.
#include "csrc/layer/cpu/layer_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/x86/target.h"

MARLIN_TARGET(MARLIN_AVX2)

#include "csrc/cpu/x86/vec_avx2.h"
#include "csrc/layer/cpu/activation_kernel.h"
#include "csrc/layer/cpu/row_kernels.h"

namespace marlin::cpu {

const LayerFunctions* avx2_layer() {
  static constexpr LayerFunctions functions{&activate<Avx2>, &sum_of_squares<Avx2>, &add_rows<Avx2>, &scale_row<Avx2>,
                                            &rotate_row<Avx2>};
  return &functions;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
