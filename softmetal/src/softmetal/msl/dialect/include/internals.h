// Internal names of Apple's library that other projects call: __metal_<function>(arguments..., math mode).
#pragma once

#define __METAL_PRECISE_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_MAYBE_FAST_MATH__ 2

#define SM_INTERNAL_1(name) float __metal_##name(float, int);
#define SM_INTERNAL_2(name) float __metal_##name(float, float, int);
#define SM_INTERNAL_3(name) float __metal_##name(float, float, float, int);
#define SM_INTERNAL_LANES(name) \
  template <typename... A>      \
  float __metal_##name(A...);
#include "../../include/softmetal/internal_names.h"
float __metal_ldexp(float, float, int);
template <typename A, typename E>
A __metal_frexp(A, __private E*);
template <typename A, typename E>
A __metal_frexp(A, __private E&);
float __metal_fma(float, float, float);
float __metal_fmax3(float, float, float);
float __metal_fmin3(float, float, float);
float __metal_nextafter(float, float);
ushort __metal_get_simdgroup_size(ushort);
ushort __metal_get_thread_index_in_simdgroup(ushort);
