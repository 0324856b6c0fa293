// NEON instances of the gated activations.
#include "csrc/layer/cpu/activation_table.h"

#if defined(__aarch64__)

#include "csrc/cpu/arm/vec_neon.h"
#include "csrc/layer/cpu/activation_kernel.h"

namespace marlin::cpu {

ActivationFunction neon_activation() {
  return activate<Neon>;
}

}  // namespace marlin::cpu

#endif
