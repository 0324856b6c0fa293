#include "csrc/mlstm/cpu/kernel_table.h"

namespace marlin::cpu {

const MlstmKernels* mlstm_kernels_of(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2:
      return avx2_mlstm_kernels();
    case Isa::avx512:
    case Isa::amx:
      return avx512_mlstm_kernels();
#elif defined(__aarch64__)
    case Isa::neon:
      return neon_mlstm_kernels();
#endif
    default:
      return portable_mlstm_kernels();
  }
}

}  // namespace marlin::cpu
