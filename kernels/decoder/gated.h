// The gated activations, in fp32.
#pragma once

#include "kernels/decoder/params.h"
#include "kernels/gemm/function_constants.h"

namespace marlin {

// Returns erf(x) with an absolute error of 1.5e-7 (Abramowitz and Stegun, 7.1.26). Metal has no error function.
MARLIN_INLINE float error_function(float x) {
  const float size = abs(x);
  const float t = 1.0f / fma(0.3275911f, size, 1.0f);
  float sum = fma(1.061405429f, t, -1.453152027f);
  sum = fma(sum, t, 1.421413741f);
  sum = fma(sum, t, -0.284496736f);
  sum = fma(sum, t, 0.254829592f);
  const float result = 1.0f - sum * t * exp(-size * size);
  return x < 0.0f ? -result : result;
}

MARLIN_INLINE float sigmoid(float x) {
  return 1.0f / (1.0f + exp(-x));
}

// Returns activation(gate) * up. `limit` is used by clamped_silu and limited_silu, `alpha` by clamped_silu.
MARLIN_INLINE float gated(float gate, float up, int activation, float limit, float alpha) {
  if (activation == int(Activation::silu)) return gate * sigmoid(gate) * up;
  if (activation == int(Activation::gelu)) {
    return 0.5f * gate * (1.0f + error_function(gate * 0.70710678f)) * up;
  }
  if (activation == int(Activation::gelu_tanh)) {
    // (1 + tanh(u)) / 2 is sigmoid(2 u).
    return gate * sigmoid(1.5957691f * fma(0.044715f * gate * gate, gate, gate)) * up;
  }
  // These expressions keep a NaN, because a comparison with NaN is false.
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  if (activation == int(Activation::limited_silu)) return g * sigmoid(g) * u;
  return g * sigmoid(alpha * g) * (u + 1.0f);
}

}  // namespace marlin
