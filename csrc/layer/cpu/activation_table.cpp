#include "csrc/layer/cpu/activation_table.h"

namespace marlin::cpu {

ActivationFunction activation_of(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return avx2_activation();
    case Isa::avx512:
    case Isa::amx:  // adds tiles to AVX-512
      return avx512_activation();
    case Isa::neon:
      return neon_activation();
    default:
      return portable_activation();
  }
}

// This build has no code for the following families.
#if !defined(__x86_64__)
ActivationFunction avx2_activation() {
  return nullptr;
}
ActivationFunction avx512_activation() {
  return nullptr;
}
#endif
#if !defined(__aarch64__)
ActivationFunction neon_activation() {
  return nullptr;
}
#endif

}  // namespace marlin::cpu
