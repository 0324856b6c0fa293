#include "csrc/decoder/cpu/kernel_table.h"

namespace marlin::cpu {

const DecoderFunctions& decoder_functions(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return *avx2_decoder_functions();
    case Isa::avx512:
    case Isa::amx:  // amx adds tiles to AVX-512, but has no tiles for these functions
      return *avx512_decoder_functions();
    case Isa::neon:
      return *neon_decoder_functions();
    default:
      return *portable_decoder_functions();
  }
}

// This build contains no code for the instruction sets below.
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
