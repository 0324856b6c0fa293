#include "csrc/layer/cpu/layer_table.h"

namespace marlin::cpu {

const LayerFunctions& layer_functions(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return *avx2_layer();
    case Isa::avx512:
    case Isa::amx:  // adds tiles to AVX-512
      return *avx512_layer();
    case Isa::neon:
      return *neon_layer();
    default:
      return *portable_layer();
  }
}

// This build has no code for the following families.
#if !defined(__x86_64__)
const LayerFunctions* avx2_layer() {
  return nullptr;
}
const LayerFunctions* avx512_layer() {
  return nullptr;
}
#endif
#if !defined(__aarch64__)
const LayerFunctions* neon_layer() {
  return nullptr;
}
#endif

}  // namespace marlin::cpu
