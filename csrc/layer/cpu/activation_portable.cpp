// Plain C++ instances of the gated activations.
#include "csrc/cpu/portable/vec_portable.h"
#include "csrc/layer/cpu/activation_kernel.h"

namespace marlin::cpu {

ActivationFunction portable_activation() {
  return activate<Portable>;
}

}  // namespace marlin::cpu
