// Type traits, numeric_limits and array.
#pragma once

namespace metal {

// The type F of a template parameter that is a function. Without this alias, the dialect would add an address space.
template <typename F>
struct sm_function_of {
  typedef F type;
};
template <typename F>
using sm_function = typename sm_function_of<F>::type;

#define SM_CONSTANT const __constant constexpr
#define SM_IS_FLOATING(T) __is_floating_point(T)
#define SM_IS_SCALAR(T) (__is_arithmetic(T) || __is_pointer(T) || __is_enum(T))
template <typename T>
T declval();
template <typename T>
struct sm_number {
  typedef T element;
  enum { width = 1, is_vector = false };
};
template <typename T, int N>
struct sm_number<vec<T, N>> {
  typedef T element;
  enum { width = N, is_vector = true };
};
#include "../../include/softmetal/traits.h"
#undef SM_CONSTANT

// In the dialect, the type behind a reference includes an address space. Metal's traits return the type without it.
#define SM_REMOVE(space)                                               \
  template <typename T>                                                \
  struct remove_reference<space T&> : type_identity<T> {};             \
  template <typename T>                                                \
  struct remove_reference<const space T&> : type_identity<const T> {}; \
  template <typename T>                                                \
  struct remove_addrspace<space T> : type_identity<T> {};              \
  template <typename T>                                                \
  struct remove_addrspace<const space T> : type_identity<const T> {};
SM_REMOVE(__private)
SM_REMOVE(__global)
SM_REMOVE(__local)
SM_REMOVE(__constant)
#undef SM_REMOVE
template <typename T>
struct decay : remove_cvref<T> {};

template <typename T>
struct _numeric_limits_impl {
  static const __constant constexpr bool is_specialized = false;
};
template <typename T>
struct numeric_limits : _numeric_limits_impl<T> {};
#define SM_LIMITS(T)                                                               \
  template <>                                                                      \
  struct _numeric_limits_impl<T> {                                                 \
    static const __constant constexpr bool is_specialized = true;                  \
    static const __constant constexpr bool is_signed = T(-1) < T(0);               \
    static const __constant constexpr bool is_integer = __is_integral(T);          \
    static const __constant constexpr bool is_exact = __is_integral(T);            \
    static const __constant constexpr bool has_infinity = __is_floating_point(T);  \
    static const __constant constexpr bool has_quiet_NaN = __is_floating_point(T); \
    static const __constant constexpr int radix = 2;                               \
    static const __constant constexpr int digits = 8 * sizeof(T);                  \
    static const __constant constexpr int digits10 = 2 * sizeof(T);                \
    static const __constant constexpr int max_exponent = 128;                      \
    static const __constant constexpr int min_exponent = -125;                     \
    static constexpr T min() { return T(0); }                                      \
    static constexpr T max() { return T(1); }                                      \
    static constexpr T lowest() { return T(0); }                                   \
    static constexpr T epsilon() { return T(0); }                                  \
    static constexpr T round_error() { return T(0); }                              \
    static constexpr T infinity() { return T(0); }                                 \
    static constexpr T quiet_NaN() { return T(0); }                                \
    static constexpr T signaling_NaN() { return T(0); }                            \
    static constexpr T denorm_min() { return T(0); }                               \
  };
SM_FLOATS(SM_LIMITS)
SM_INTEGERS(SM_LIMITS)
SM_LIMITS(bool)
#undef SM_LIMITS

template <typename T, size_t N>
struct array {
  T sm_elements[N];
  constexpr size_t size() const { return N; }
#define SM_ELEMENT(space)                                                              \
  constexpr space T& operator[](size_t i) space { return sm_elements[i]; }             \
  constexpr const space T& operator[](size_t i) const space { return sm_elements[i]; } \
  constexpr space T* data() space { return sm_elements; }
  SM_ELEMENT(__private)
  SM_ELEMENT(__global)
  SM_ELEMENT(__local)
#undef SM_ELEMENT
  constexpr const __constant T& operator[](size_t i) const __constant { return sm_elements[i]; }
};

template <typename T>
using uniform = T;
template <typename T>
constexpr T make_uniform(T x) {
  return x;
}

}  // namespace metal
