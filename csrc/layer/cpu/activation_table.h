// The gated activations of each instruction-set family.
#pragma once

#include "csrc/cpu/capability.h"
#include "kernels/layer/params.h"

namespace marlin::cpu {

inline constexpr int kActivationBlock = 512;  // elements that are computed at a time

// Both arrays are readable up to the next multiple of 16 elements.
struct GatedBlock {
  float* gate;  // [count]; the result replaces it
  const float* up;
  int count;
  float limit;
  float alpha;
};
using ActivationFunction = void (*)(Activation, const GatedBlock&);

ActivationFunction activation_of(Isa isa);

// Each returns nullptr if this build has no code for the family.
ActivationFunction portable_activation();
ActivationFunction avx2_activation();
ActivationFunction avx512_activation();
ActivationFunction neon_activation();

}  // namespace marlin::cpu
