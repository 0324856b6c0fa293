// AVX-512 instances of the gated activations.
#include "csrc/layer/cpu/activation_table.h"

#if defined(__x86_64__)

#include "csrc/cpu/x86/target.h"

MARLIN_TARGET(MARLIN_AVX512)

#include "csrc/cpu/x86/vec_avx512.h"
#include "csrc/layer/cpu/activation_kernel.h"

namespace marlin::cpu {

ActivationFunction avx512_activation() {
  return activate<Avx512>;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
