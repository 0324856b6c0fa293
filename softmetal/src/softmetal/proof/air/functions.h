// The air.* functions that Apple's Metal compiler calls, on clang's built-in types. Include this file after
// metal_stdlib and thunk.h.
//
// Kernels compiled by Apple call these functions, and kernels compiled by us call msl/include. So that a comparison of
// the two compiled forms also compares the two libraries, conversions, integer functions, shuffles and folds share no
// code. Functions without an exact result (metal_math) are shared, because Apple's back end chooses their last bits.
// The executor's exchange between lanes and its matrix product are shared, too.
#pragma once

#define AIR_FUNCTION inline __attribute__((always_inline))
#define AIR_UNCHECKED __attribute__((no_sanitize("thread")))  // reads the executor's own memory

namespace air {

template <class T, int N>
using vector = T __attribute__((ext_vector_type(N)));
typedef _Float16 f16;
typedef __bf16 bf16;
typedef float f32;
typedef bool u1;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

template <class T>
struct shape {
  typedef T element;
  static constexpr int size = 1;
  static T& at(T& v, int) { return v; }
};
template <class T, int N>
struct shape<vector<T, N>> {
  typedef T element;
  static constexpr int size = N;
  static auto at(vector<T, N>& v, int i) { return v[i]; }
};
template <class T>
constexpr bool is_real = __is_same(T, f16) || __is_same(T, bf16) || __is_same(T, f32);

}  // namespace air

// Rounds to the nearest bfloat, ties to even. On processors without AVX512-BF16, clang calls this function to convert
// float to bfloat. Libraries of GCC 12 and older do not contain it.
extern "C" AIR_UNCHECKED __attribute__((used, visibility("hidden"))) inline __bf16 __truncsfbf2(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = value != value ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1);
  return __builtin_bit_cast(__bf16, static_cast<uint16_t>(rounded >> 16));
}

namespace air {

// ---- arithmetic ----------------------------------------------------------------------------------------------------

template <class R, class A>
AIR_FUNCTION R convert(A a) {
  if constexpr (shape<A>::size > 1) {
    return __builtin_convertvector(a, R);
  } else if constexpr (__is_same(R, bool)) {
    return a != A(0);
  } else if constexpr (is_real<R> && is_real<A>) {
    return static_cast<R>(static_cast<f32>(a));  // f32 holds every f16 and bf16
  } else {
    return static_cast<R>(a);  // float to integer saturates: -fno-strict-float-cast-overflow
  }
}

// Functions that are applied to each element of a vector.
#define AIR_EACH_1(name, value)                                                \
  template <class T>                                                           \
  AIR_FUNCTION T name(T x) {                                                   \
    T r;                                                                       \
    for (int i = 0; i < shape<T>::size; ++i) {                                 \
      typename shape<T>::element a = element(x, i);                            \
      place(r, i, static_cast<typename shape<T>::element>(value));             \
    }                                                                          \
    return r;                                                                  \
  }
#define AIR_EACH_2(name, value)                                                \
  template <class T>                                                           \
  AIR_FUNCTION T name(T x, T y) {                                              \
    T r;                                                                       \
    for (int i = 0; i < shape<T>::size; ++i) {                                 \
      typename shape<T>::element a = element(x, i), b = element(y, i);         \
      place(r, i, static_cast<typename shape<T>::element>(value));             \
    }                                                                          \
    return r;                                                                  \
  }

template <class T>
AIR_FUNCTION typename shape<T>::element element(const T& x, int i) {
  if constexpr (shape<T>::size > 1) return x[i];
  else return x;
}
template <class T, class E>
AIR_FUNCTION void place(T& x, int i, E value) {
  if constexpr (shape<T>::size > 1) x[i] = value;
  else x = value;
}

AIR_EACH_1(abs, a < 0 ? 0 - a : a)
AIR_EACH_2(min, b < a ? b : a)
AIR_EACH_2(max, a < b ? b : a)
AIR_EACH_1(fabs, __builtin_fabsf(float(a)))
AIR_EACH_1(floor, __builtin_floorf(float(a)))
AIR_EACH_1(ceil, __builtin_ceilf(float(a)))
AIR_EACH_1(rint, __builtin_nearbyintf(float(a)))
AIR_EACH_1(round, __builtin_roundf(float(a)))
AIR_EACH_1(trunc, __builtin_truncf(float(a)))
AIR_EACH_1(fract, __builtin_fminf(float(a) - __builtin_floorf(float(a)), 0x1.fffffep-1f))
AIR_EACH_2(fmod, __builtin_fmodf(float(a), float(b)))
AIR_EACH_2(copysign, __builtin_copysignf(float(a), float(b)))
// If one operand is a NaN, the result is the other operand.
AIR_EACH_2(fmin, b < a || a != a ? b : a)
AIR_EACH_2(fmax, a < b || a != a ? b : a)

template <class T>
AIR_FUNCTION T clamp(T x, T low, T high) {
  if constexpr (is_real<typename shape<T>::element>) return fmin(fmax(x, low), high);
  else return min(max(x, low), high);
}
AIR_FUNCTION f32 fma(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
// The product of two halves is exact in double, and the sum has 53 bits. The conversion to half therefore rounds
// correctly, with one exception: if these 53 bits are exactly between two halves, a lost bit could have determined the
// direction.
AIR_FUNCTION f16 fma(f16 a, f16 b, f16 c) { return static_cast<f16>(double(a) * double(b) + double(c)); }
template <class T, int N>
AIR_FUNCTION vector<T, N> fma(vector<T, N> a, vector<T, N> b, vector<T, N> c) {
  for (int i = 0; i < N; ++i)
    a[i] = fma(T(a[i]), T(b[i]), T(c[i]));
  return a;
}
template <class T, int N>
AIR_FUNCTION T dot(vector<T, N> a, vector<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i)
    sum = sum + a[i] * b[i];
  return sum;
}
template <class T>
AIR_FUNCTION T nextafter(T from, T to) {
  return metal::nextafter(from, to);
}
AIR_FUNCTION f32 ldexp(f32 x, u32 exponent) { return __builtin_ldexpf(x, static_cast<int>(exponent)); }
template <int N>
AIR_FUNCTION bool any(vector<u8, N> v) {
  bool found = false;
  for (int i = 0; i < N; ++i)
    found = found || v[i];
  return found;
}
template <int N>
AIR_FUNCTION bool all(vector<u8, N> v) {
  bool every = true;
  for (int i = 0; i < N; ++i)
    every = every && v[i];
  return every;
}

// ---- atomics: relaxed; orders and scopes are ignored ---------------------------------------------------------------

template <class T>
AIR_FUNCTION T atomic_load(void* p) {
  T value;
  sm_note_atomic(p, sizeof(T), SM_ATOMIC_LOAD);
  __atomic_load(static_cast<T*>(p), &value, __ATOMIC_RELAXED);
  return value;
}
template <class T>
AIR_FUNCTION void atomic_store(void* p, T value) {
  sm_note_atomic(p, sizeof(T), SM_ATOMIC_STORE);
  __atomic_store(static_cast<T*>(p), &value, __ATOMIC_RELAXED);
}
template <class T>
AIR_FUNCTION T atomic_exchange(void* p, T value) {
  T old;
  sm_note_atomic(p, sizeof(T), SM_ATOMIC_UPDATE);
  __atomic_exchange(static_cast<T*>(p), &value, &old, __ATOMIC_RELAXED);
  return old;
}
// `expected` points to the expected value. The function stores the actual value there, and also returns it.
template <class T>
AIR_FUNCTION T atomic_compare_exchange(void* p, void* expected, T value) {
  sm_note_atomic(p, sizeof(T), SM_ATOMIC_UPDATE);
  T* seen = static_cast<T*>(expected);
  __atomic_compare_exchange(static_cast<T*>(p), seen, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return *seen;
}
template <class T, class F>
AIR_FUNCTION T atomic_update(void* p, T operand, F combine) {
  sm_note_atomic(p, sizeof(T), SM_ATOMIC_UPDATE);
  T* place = static_cast<T*>(p);
  T old, fresh;
  __atomic_load(place, &old, __ATOMIC_RELAXED);
  do {
    fresh = combine(old, operand);
  } while (!__atomic_compare_exchange(place, &old, &fresh, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
struct minus {
  template <class T>
  T operator()(T a, T b) const { return static_cast<T>(a - b); }
};

template <class B>
AIR_FUNCTION void builtin(uint32_t* place) {
  const sm_uint3 value = B::read();
  place[0] = value.x;
  place[1] = value.y;
  place[2] = value.z;
}

}  // namespace air

#include "lanes.h"
#include "tensors.h"
