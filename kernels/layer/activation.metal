// The gated activation between the products of a feed-forward block, in fp32. Each thread computes one element.
#include "kernels/shared/variants.h"

#include "kernels/layer/params.h"

using namespace metal;
using namespace marlin;

// Returns erf(x) with an absolute error of 1.5e-7 (Abramowitz and Stegun, 7.1.26). Metal has no error function.
static float error_function(float x) {
  const float size = abs(x);
  const float t = 1.0f / fma(0.3275911f, size, 1.0f);
  float sum = fma(1.061405429f, t, -1.453152027f);
  sum = fma(sum, t, 1.421413741f);
  sum = fma(sum, t, -0.284496736f);
  sum = fma(sum, t, 0.254829592f);
  const float result = 1.0f - sum * t * exp(-size * size);
  return x < 0.0f ? -result : result;
}

static float sigmoid(float x) {
  return 1.0f / (1.0f + exp(-x));
}

static float gated(float gate, float up, constant ActivationParams& params) {
  if (params.activation == int(Activation::silu)) return gate * sigmoid(gate) * up;
  if (params.activation == int(Activation::gelu)) {
    return 0.5f * gate * (1.0f + error_function(gate * 0.70710678f)) * up;
  }
  if (params.activation == int(Activation::gelu_tanh)) {
    // (1 + tanh(u)) / 2 is sigmoid(2 u).
    return gate * sigmoid(1.5957691f * fma(0.044715f * gate * gate, gate, gate)) * up;
  }
  // NaN stays NaN, because a comparison with NaN is false.
  const float g = gate > params.limit ? params.limit : gate;
  const float u = up > params.limit ? params.limit : up < -params.limit ? -params.limit : up;
  return g * sigmoid(params.alpha * g) * (u + 1.0f);
}

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
  out[row * params.columns + column] = T(gated(g, u, params));
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_ACTIVATION(MARLIN_INSTANTIATE))
