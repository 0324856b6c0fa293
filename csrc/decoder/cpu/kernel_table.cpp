#include "csrc/decoder/cpu/kernel_table.h"

namespace marlin::cpu {

const DecoderFunctions& decoder_functions(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return *avx2_decoder_functions();
    case Isa::avx512:
    case Isa::amx:  // adds tiles to AVX-512
      return *avx512_decoder_functions();
    case Isa::neon:
      return *neon_decoder_functions();
    default:
      return *portable_decoder_functions();
  }
}

// This build has no code for the following families.
#if !defined(__x86_64__)
const DecoderFunctions* avx2_decoder_functions() {
  return nullptr;
}
const DecoderFunctions* avx512_decoder_functions() {
  return nullptr;
}
#endif
#if !defined(__aarch64__)
const DecoderFunctions* neon_decoder_functions() {
  return nullptr;
}
#endif

}  // namespace marlin::cpu
