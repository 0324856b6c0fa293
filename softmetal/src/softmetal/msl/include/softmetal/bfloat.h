// bfloat is a class, because Metal's rules for bfloat differ from those of C++. A bfloat widens to float implicitly,
// but float and half become bfloat only by a cast (MSL 2.1). Operations are done in single precision and rounded to
// nearest even. Subnormal results become zero, as in single precision on the GPU.
#pragma once

#include <metal_config>

namespace sm {
namespace types {

struct bfloat;

template <class T>
constexpr bool is_integer_like = __is_integral(T) || __is_enum(T);
template <bool B, class T = void>
struct only_if {};
template <class T>
struct only_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using only_if_t = typename only_if<B, T>::type;

struct bfloat {
  uint16_t bits;

  bfloat() = default;
  constexpr explicit bfloat(float x) : bits(rounded(__builtin_bit_cast(uint32_t, x))) {}
  constexpr explicit bfloat(_Float16 x) : bfloat(static_cast<float>(x)) {}
  template <class T, class = only_if_t<is_integer_like<T>>>
  constexpr bfloat(T x) : bfloat(static_cast<float>(x)) {}
  // Accepts objects with a conversion to bool, because bool is an integer.
  template <class C, class = decltype(static_cast<const C*>(nullptr)->operator bool())>
  constexpr bfloat(const C& x) : bfloat(static_cast<bool>(x)) {}

  constexpr float value() const { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }

  // The conversions are templates, so that each matches only its exact type. The conversion to integers is explicit, so
  // that the type of `c ? b : 0` is bfloat. The conversion to uint is implicit, because other projects' kernels need
  // it.
  template <class F, class = only_if_t<__is_same(F, float) || __is_same(F, bool) || __is_same(F, unsigned)>>
  constexpr operator F() const {
    return static_cast<F>(value());
  }
  template <class F, class = only_if_t<(is_integer_like<F> && !__is_same(F, bool) && !__is_same(F, unsigned)) ||
                                       __is_same(F, _Float16)>, class = void>
  constexpr explicit operator F() const {
    return static_cast<F>(value());
  }

  static constexpr uint16_t rounded(uint32_t x) {
    if ((x & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((x >> 16) | 0x40u);
    if ((x & 0x7f800000u) == 0) return static_cast<uint16_t>((x >> 16) & 0x8000u);
    return static_cast<uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
  }

#define SM_BFLOAT_OPERATOR(op)                                                                                     \
  friend constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(a.value() op b.value()); }               \
  friend constexpr float operator op(bfloat a, float b) { return a.value() op b; }                                 \
  friend constexpr float operator op(float a, bfloat b) { return a op b.value(); }                                 \
  friend constexpr float operator op(bfloat a, _Float16 b) { return a.value() op static_cast<float>(b); }          \
  friend constexpr float operator op(_Float16 a, bfloat b) { return static_cast<float>(a) op b.value(); }          \
  template <class T, class = only_if_t<is_integer_like<T>>>                                                        \
  friend constexpr bfloat operator op(bfloat a, T b) {                                                             \
    return a op bfloat(b);                                                                                         \
  }                                                                                                                \
  template <class T, class = only_if_t<is_integer_like<T>>>                                                        \
  friend constexpr bfloat operator op(T a, bfloat b) {                                                             \
    return bfloat(a) op b;                                                                                         \
  }                                                                                                                \
  template <class T>                                                                                               \
  constexpr bfloat& operator op##=(T b) {                                                                          \
    return *this = static_cast<bfloat>(*this op b);                                                                \
  }                                                                                                                \
  template <class T, class = only_if_t<__is_arithmetic(T)>>                                                        \
  friend constexpr T& operator op##=(T& a, bfloat b) {                                                             \
    return a = static_cast<T>(a op b);                                                                             \
  }
  SM_BFLOAT_OPERATOR(+)
  SM_BFLOAT_OPERATOR(-)
  SM_BFLOAT_OPERATOR(*)
  SM_BFLOAT_OPERATOR(/)
#undef SM_BFLOAT_OPERATOR

#define SM_BFLOAT_COMPARISON(op)                                                                                  \
  friend constexpr bool operator op(bfloat a, bfloat b) { return a.value() op b.value(); }                        \
  friend constexpr bool operator op(bfloat a, float b) { return a.value() op b; }                                 \
  friend constexpr bool operator op(float a, bfloat b) { return a op b.value(); }                                 \
  friend constexpr bool operator op(bfloat a, _Float16 b) { return a.value() op static_cast<float>(b); }          \
  friend constexpr bool operator op(_Float16 a, bfloat b) { return static_cast<float>(a) op b.value(); }          \
  template <class T, class = only_if_t<is_integer_like<T>>>                                                       \
  friend constexpr bool operator op(bfloat a, T b) {                                                              \
    return a op bfloat(b);                                                                                        \
  }                                                                                                               \
  template <class T, class = only_if_t<is_integer_like<T>>>                                                       \
  friend constexpr bool operator op(T a, bfloat b) {                                                              \
    return bfloat(a) op b;                                                                                        \
  }
  SM_BFLOAT_COMPARISON(==)
  SM_BFLOAT_COMPARISON(!=)
  SM_BFLOAT_COMPARISON(<)
  SM_BFLOAT_COMPARISON(<=)
  SM_BFLOAT_COMPARISON(>)
  SM_BFLOAT_COMPARISON(>=)
#undef SM_BFLOAT_COMPARISON

  friend constexpr bfloat operator+(bfloat a) { return a; }
  friend constexpr bfloat operator-(bfloat a) {
    a.bits = static_cast<uint16_t>(a.bits ^ 0x8000u);
    return a;
  }
  friend constexpr bool operator!(bfloat a) { return !a.value(); }
  constexpr bfloat& operator++() { return *this += 1; }
  constexpr bfloat& operator--() { return *this -= 1; }
  constexpr bfloat operator++(int) {
    bfloat before = *this;
    *this += 1;
    return before;
  }
  constexpr bfloat operator--(int) {
    bfloat before = *this;
    *this -= 1;
    return before;
  }
};

}  // namespace types
}  // namespace sm
