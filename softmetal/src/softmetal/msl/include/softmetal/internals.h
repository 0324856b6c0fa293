// Internal names of Apple's library that other projects call: __metal_<function>(arguments..., math mode) and
// __metal_<simd function>(arguments...).
#pragma once

#include <metal_math>
#include <metal_quadgroup>
#include <metal_simdgroup>

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

template <class A, class Mode>
METAL_FUNC auto __metal_ldexp(A a, int k, Mode) { return metal::ldexp(a, k); }
template <class A>
METAL_FUNC auto __metal_frexp(A a, int* exponent) { return metal::frexp(a, *exponent); }

#define SM_INTERNAL(name)                                                          \
  template <class... A>                                                            \
  METAL_FUNC auto __metal_##name(A... a) {                                         \
    return ::sm::in_mode([](auto... x) { return metal::precise::name(x...); },     \
                         [](auto... x) { return metal::fast::name(x...); }, a...); \
  }
#define SM_INTERNAL_1 SM_INTERNAL
#define SM_INTERNAL_2 SM_INTERNAL
#define SM_INTERNAL_3 SM_INTERNAL
#define SM_INTERNAL_LANES(name)                          \
  template <class... A>                                  \
  METAL_FUNC SM_CONVERGENT auto __metal_##name(A... a) { \
    return metal::name(a...);                            \
  }
#include <softmetal/internal_names.h>
#undef SM_INTERNAL
// The bitwise functions have only integer forms. A float argument is converted.
METAL_FUNC SM_CONVERGENT int __metal_simd_xor(float a) { return metal::simd_xor(static_cast<int>(a)); }
METAL_FUNC SM_CONVERGENT int __metal_simd_and(float a) { return metal::simd_and(static_cast<int>(a)); }
METAL_FUNC SM_CONVERGENT int __metal_simd_or(float a) { return metal::simd_or(static_cast<int>(a)); }

METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return static_cast<ushort>(sm::lane_index()); }
