// Internal names of Apple's library that other projects call: __metal_<function>(arguments..., math mode) and
// __metal_<simd function>(arguments...).
#pragma once

#include <metal_math>
#include <metal_quadgroup>
#include <metal_simdgroup>

#define SM_INTERNAL(name)                                                             \
  template <class... A>                                                               \
  METAL_FUNC auto __metal_##name(A... a) {                                            \
    return ::sm::in_mode([](auto... x) { return metal::precise::name(x...); },        \
                         [](auto... x) { return metal::fast::name(x...); }, a...);    \
  }

namespace sm {

template <class P, class F, class A>
METAL_FUNC auto in_mode(P precise, F, A a, precise_mode) { return precise(a); }
template <class P, class F, class A>
METAL_FUNC auto in_mode(P, F fast, A a, fast_mode) { return fast(a); }
template <class P, class F, class A>
METAL_FUNC auto in_mode(P precise, F, A a, A b, precise_mode) { return precise(a, b); }
template <class P, class F, class A>
METAL_FUNC auto in_mode(P, F fast, A a, A b, fast_mode) { return fast(a, b); }
template <class P, class F, class A>
METAL_FUNC auto in_mode(P precise, F, A a, A b, A c, precise_mode) { return precise(a, b, c); }
template <class P, class F, class A>
METAL_FUNC auto in_mode(P, F fast, A a, A b, A c, fast_mode) { return fast(a, b, c); }
template <class P, class F, class A>
METAL_FUNC auto in_mode(P precise, F, A a, A b) { return precise(a, b); }
template <class P, class F, class A>
METAL_FUNC auto in_mode(P precise, F, A a, A b, A c) { return precise(a, b, c); }

}  // namespace sm

SM_INTERNAL(acos)
SM_INTERNAL(acosh)
SM_INTERNAL(asin)
SM_INTERNAL(asinh)
SM_INTERNAL(atan)
SM_INTERNAL(atan2)
SM_INTERNAL(atanh)
SM_INTERNAL(ceil)
SM_INTERNAL(cos)
SM_INTERNAL(cosh)
SM_INTERNAL(cospi)
SM_INTERNAL(divide)
SM_INTERNAL(exp)
SM_INTERNAL(exp10)
SM_INTERNAL(exp2)
SM_INTERNAL(fabs)
SM_INTERNAL(fdim)
SM_INTERNAL(floor)
SM_INTERNAL(fma)
SM_INTERNAL(fmax)
SM_INTERNAL(fmax3)
SM_INTERNAL(fmedian3)
SM_INTERNAL(fmin)
SM_INTERNAL(fmin3)
SM_INTERNAL(fmod)
SM_INTERNAL(fract)
SM_INTERNAL(log)
SM_INTERNAL(log10)
SM_INTERNAL(log2)
SM_INTERNAL(nextafter)
SM_INTERNAL(pow)
SM_INTERNAL(powr)
SM_INTERNAL(rint)
SM_INTERNAL(round)
SM_INTERNAL(rsqrt)
SM_INTERNAL(sin)
SM_INTERNAL(sinh)
SM_INTERNAL(sinpi)
SM_INTERNAL(sqrt)
SM_INTERNAL(tan)
SM_INTERNAL(tanh)
SM_INTERNAL(tanpi)
SM_INTERNAL(trunc)
#undef SM_INTERNAL

template <class A, class Mode>
METAL_FUNC auto __metal_ldexp(A a, int k, Mode) { return metal::ldexp(a, k); }
template <class A>
METAL_FUNC auto __metal_frexp(A a, int* exponent) { return metal::frexp(a, *exponent); }

#define SM_INTERNAL_SIMD(name)                              \
  template <class... A>                                     \
  METAL_FUNC SM_CONVERGENT auto __metal_##name(A... a) {    \
    return metal::name(a...);                               \
  }
SM_INTERNAL_SIMD(simd_broadcast)
SM_INTERNAL_SIMD(simd_shuffle)
SM_INTERNAL_SIMD(simd_shuffle_xor)
SM_INTERNAL_SIMD(simd_shuffle_up)
SM_INTERNAL_SIMD(simd_shuffle_down)
SM_INTERNAL_SIMD(simd_shuffle_rotate_up)
SM_INTERNAL_SIMD(simd_shuffle_rotate_down)
SM_INTERNAL_SIMD(simd_shuffle_and_fill_up)
SM_INTERNAL_SIMD(simd_shuffle_and_fill_down)
SM_INTERNAL_SIMD(simd_sum)
SM_INTERNAL_SIMD(simd_product)
SM_INTERNAL_SIMD(simd_min)
SM_INTERNAL_SIMD(simd_max)
SM_INTERNAL_SIMD(simd_and)
SM_INTERNAL_SIMD(simd_or)
SM_INTERNAL_SIMD(simd_xor)
SM_INTERNAL_SIMD(simd_prefix_inclusive_sum)
SM_INTERNAL_SIMD(simd_prefix_exclusive_sum)
SM_INTERNAL_SIMD(simd_prefix_inclusive_product)
SM_INTERNAL_SIMD(simd_prefix_exclusive_product)
#undef SM_INTERNAL_SIMD
// The bitwise functions have only integer forms. A float argument is converted.
METAL_FUNC SM_CONVERGENT int __metal_simd_xor(float a) { return metal::simd_xor(static_cast<int>(a)); }
METAL_FUNC SM_CONVERGENT int __metal_simd_and(float a) { return metal::simd_and(static_cast<int>(a)); }
METAL_FUNC SM_CONVERGENT int __metal_simd_or(float a) { return metal::simd_or(static_cast<int>(a)); }

METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return static_cast<ushort>(sm::lane_index()); }
