// Internal names of Apple's library that other projects call: __metal_<function>(arguments..., math mode).
#pragma once

#define __METAL_PRECISE_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_MAYBE_FAST_MATH__ 2

#define SM_INTERNAL_1(name) float __metal_##name(float, int);
#define SM_INTERNAL_2(name) float __metal_##name(float, float, int);
#define SM_INTERNAL_3(name) float __metal_##name(float, float, float, int);
SM_INTERNAL_1(acos)
SM_INTERNAL_1(acosh)
SM_INTERNAL_1(asin)
SM_INTERNAL_1(asinh)
SM_INTERNAL_1(atan)
SM_INTERNAL_1(atanh)
SM_INTERNAL_1(ceil)
SM_INTERNAL_1(cos)
SM_INTERNAL_1(cosh)
SM_INTERNAL_1(cospi)
SM_INTERNAL_1(exp)
SM_INTERNAL_1(exp10)
SM_INTERNAL_1(exp2)
SM_INTERNAL_1(fabs)
SM_INTERNAL_1(floor)
SM_INTERNAL_1(fract)
SM_INTERNAL_1(log)
SM_INTERNAL_1(log10)
SM_INTERNAL_1(log2)
SM_INTERNAL_1(rint)
SM_INTERNAL_1(round)
SM_INTERNAL_1(rsqrt)
SM_INTERNAL_1(sin)
SM_INTERNAL_1(sinh)
SM_INTERNAL_1(sinpi)
SM_INTERNAL_1(sqrt)
SM_INTERNAL_1(tan)
SM_INTERNAL_1(tanh)
SM_INTERNAL_1(tanpi)
SM_INTERNAL_1(trunc)
SM_INTERNAL_2(atan2)
SM_INTERNAL_2(divide)
SM_INTERNAL_2(fdim)
SM_INTERNAL_2(fmax)
SM_INTERNAL_2(fmin)
SM_INTERNAL_2(fmod)
SM_INTERNAL_2(ldexp)
SM_INTERNAL_2(nextafter)
SM_INTERNAL_2(pow)
SM_INTERNAL_2(powr)
SM_INTERNAL_3(fma)
SM_INTERNAL_3(fmax3)
SM_INTERNAL_3(fmedian3)
SM_INTERNAL_3(fmin3)
#undef SM_INTERNAL_1
#undef SM_INTERNAL_2
#undef SM_INTERNAL_3
template <typename A, typename E>
A __metal_frexp(A, __private E*);
template <typename A, typename E>
A __metal_frexp(A, __private E&);
float __metal_fma(float, float, float);
float __metal_fmax3(float, float, float);
float __metal_fmin3(float, float, float);
float __metal_nextafter(float, float);

#define SM_INTERNAL_LANES(name) \
  template <typename... A>      \
  float __metal_##name(A...);
SM_INTERNAL_LANES(simd_broadcast)
SM_INTERNAL_LANES(simd_shuffle)
SM_INTERNAL_LANES(simd_shuffle_xor)
SM_INTERNAL_LANES(simd_shuffle_up)
SM_INTERNAL_LANES(simd_shuffle_down)
SM_INTERNAL_LANES(simd_shuffle_rotate_up)
SM_INTERNAL_LANES(simd_shuffle_rotate_down)
SM_INTERNAL_LANES(simd_shuffle_and_fill_up)
SM_INTERNAL_LANES(simd_shuffle_and_fill_down)
SM_INTERNAL_LANES(simd_sum)
SM_INTERNAL_LANES(simd_product)
SM_INTERNAL_LANES(simd_min)
SM_INTERNAL_LANES(simd_max)
SM_INTERNAL_LANES(simd_and)
SM_INTERNAL_LANES(simd_or)
SM_INTERNAL_LANES(simd_xor)
SM_INTERNAL_LANES(simd_prefix_inclusive_sum)
SM_INTERNAL_LANES(simd_prefix_exclusive_sum)
SM_INTERNAL_LANES(simd_prefix_inclusive_product)
SM_INTERNAL_LANES(simd_prefix_exclusive_product)
#undef SM_INTERNAL_LANES
ushort __metal_get_simdgroup_size(ushort);
ushort __metal_get_thread_index_in_simdgroup(ushort);
