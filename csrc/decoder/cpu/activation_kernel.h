// Gated activations of fp32 vectors. The functions are templates of a vector policy V (vec_*.h), so the code of
// different instruction sets never shares a symbol.
#pragma once

#include "csrc/cpu/vector_math.h"
#include "csrc/decoder/cpu/kernel_table.h"
#include "csrc/decoder/cpu/row_kernels.h"

namespace marlin::cpu {

// Returns `positive` for x >= 0 and `negative` for x < 0. If x is NaN, the result is NaN if `negative` is NaN, and
// otherwise undefined.
template <class V>
[[gnu::always_inline]] inline typename V::F by_sign(typename V::F x, typename V::F positive, typename V::F negative) {
  return V::add(V::zero_below(x, 0.F, positive), V::sub(negative, V::zero_below(x, 0.F, negative)));
}

template <class V>
[[gnu::always_inline]] inline typename V::F negated(typename V::F x) {
  return V::sub(V::zero(), x);
}

// Below kLowest the result would be subnormal, so it is 0 there. The bound also keeps the exponential finite.
template <class V>
[[gnu::always_inline]] inline typename V::F sigmoid(typename V::F x) {
  constexpr float kLowest = -87.F;
  const typename V::F one = V::set1(1.F);
  const typename V::F power = exp_vector<V>(negated<V>(V::max(V::set1(kLowest), x)));
  return V::zero_below(x, kLowest, V::div(one, V::add(one, power)));
}

// Returns erf(x) with an absolute error of 1.5e-7 (Abramowitz and Stegun, 7.1.26), as kernels/decoder/gated.h does.
template <class V>
[[gnu::always_inline]] inline typename V::F error_function(typename V::F x) {
  using F = typename V::F;
  const F one = V::set1(1.F);
  const F size = V::max(negated<V>(x), x);
  const F t = V::div(one, V::fma(V::set1(0.3275911F), size, one));
  const F sum = polynomial<V>(t, 1.061405429F, -1.453152027F, 1.421413741F, -0.284496736F, 0.254829592F);
  const F result = V::fnma(V::mul(sum, t), exp_vector<V>(negated<V>(V::mul(size, size))), one);
  return by_sign<V>(x, result, negated<V>(result));
}

template <class V, Activation activation>
[[gnu::always_inline]] inline typename V::F gated(typename V::F g, typename V::F u, float limit, float alpha) {
  using F = typename V::F;
  if constexpr (activation == Activation::silu) return V::mul(V::mul(g, sigmoid<V>(g)), u);
  if constexpr (activation == Activation::gelu) {
    const F twice = V::add(V::set1(1.F), error_function<V>(V::mul(g, V::set1(0.70710678F))));
    return V::mul(V::mul(V::mul(V::set1(0.5F), g), twice), u);
  }
  if constexpr (activation == Activation::gelu_tanh) {
    // (1 + tanh(u)) / 2 is sigmoid(2 u).
    const F cubic = V::fma(V::mul(V::mul(V::set1(0.044715F), g), g), g, g);
    return V::mul(V::mul(g, sigmoid<V>(V::mul(V::set1(1.5957691F), cubic))), u);
  }
  // V::max returns its second argument if that is NaN, so a NaN remains a NaN here.
  const F lowest = V::set1(-limit);
  const F bounded = negated<V>(V::max(lowest, negated<V>(g)));
  const F factor = V::max(lowest, negated<V>(V::max(lowest, negated<V>(u))));
  if constexpr (activation == Activation::limited_silu) return V::mul(V::mul(bounded, sigmoid<V>(bounded)), factor);
  return V::mul(V::mul(bounded, sigmoid<V>(V::mul(V::set1(alpha), bounded))), V::add(factor, V::set1(1.F)));
}

template <class V, Activation activation>
void activate_all(const GatedBlock& block) {
  for (int i = 0; i < block.count; i += V::width) {
    const typename V::F result =
        gated<V, activation>(V::load(block.gate + i), V::load(block.up + i), block.limit, block.alpha);
    V::store(block.out + i, result);
  }
}

template <class V>
void activate(Activation activation, const GatedBlock& block) {
  switch (activation) {
    case Activation::silu:
      return activate_all<V, Activation::silu>(block);
    case Activation::gelu:
      return activate_all<V, Activation::gelu>(block);
    case Activation::gelu_tanh:
      return activate_all<V, Activation::gelu_tanh>(block);
    case Activation::clamped_silu:
      return activate_all<V, Activation::clamped_silu>(block);
    case Activation::limited_silu:
      return activate_all<V, Activation::limited_silu>(block);
  }
}

}  // namespace marlin::cpu

// Defines a function that returns the functions for the vector policy V.
#define MARLIN_DECODER_FUNCTIONS(function, V)                                                                   \
  namespace marlin::cpu {                                                                                       \
  const DecoderFunctions* function() {                                                                          \
    static constexpr DecoderFunctions kFunctions{&activate<V>, &sum_of_squares<V>, &add_rows<V>, &scale_row<V>, \
                                                 &rotate_row<V>};                                               \
    return &kFunctions;                                                                                         \
  }                                                                                                             \
  }
