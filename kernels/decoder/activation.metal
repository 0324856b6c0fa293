// The gated activation of a feed-forward block. Each thread computes one element.
#include "kernels/shared/kernel_list.h"

#include "kernels/decoder/gated.h"

using namespace metal;
using namespace marlin;

template <typename T>
[[kernel]] void gated_activation(const device T* gate [[buffer(kSlotGate)]], const device T* up [[buffer(kSlotUp)]],
                                 device T* out [[buffer(kSlotActivated)]],
                                 constant ActivationParams& params [[buffer(kSlotParams)]],
                                 uint2 position [[thread_position_in_grid]]) {
  if (position.x >= params.columns || position.y >= params.rows) return;
  const long row = position.y;
  const long column = position.x;
  const float g = float(gate[row * params.gate_row + column * params.gate_column]);
  const float u = float(up[row * params.up_row + column * params.up_column]);
  out[row * params.columns + column] = T(gated(g, u, params.activation, params.limit, params.alpha));
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_ACTIVATION(MARLIN_INSTANTIATE))
