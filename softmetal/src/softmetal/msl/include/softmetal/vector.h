// vec<T, N>: Metal's vectors as classes. In Metal, vectors are built-in types, so argument-dependent lookup finds no
// functions for them. Here the classes are in a separate namespace, in which the lookup finds only the operators of
// vectors.
#pragma once

#include <softmetal/bfloat.h>
#include <softmetal/swizzle.h>

namespace sm {

namespace types {
template <class T, int N>
struct vec;
template <class V>
struct packed;
}  // namespace types
using types::packed;
using types::vec;

template <class T>
struct shape {  // element type and number of elements; 0 elements: a scalar
  using element = T;
  static constexpr int size = 0;
  static constexpr int parts = 1;
  static constexpr bool scalar = __is_arithmetic(T) || __is_enum(T) || __is_same(T, _Float16) || __is_same(T, types::bfloat);
};
template <class T>
struct shape<const T> : shape<T> {};
template <class T>
struct shape<volatile T> : shape<T> {};
template <class T>
struct shape<T&> : shape<T> {};
template <class T, int N>
struct shape<vec<T, N>> {
  using element = T;
  static constexpr int size = N;
  static constexpr int parts = N;
  static constexpr bool scalar = false;
};
template <class V>
struct shape<packed<V>> : shape<V> {};

template <bool B, class T = void>
struct enable {};
template <class T>
struct enable<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_t = typename enable<B, T>::type;

template <class... A>
constexpr int count_parts() {
  int total = 0;
  using expand = int[];
  (void)expand{0, (total += shape<A>::parts)...};
  return total;
}

template <class... A>
constexpr bool all_numeric() {
  bool ok = true;
  using expand = int[];
  (void)expand{0, (ok = ok && (shape<A>::scalar || shape<A>::size > 0), 0)...};
  return ok;
}

template <int N>
struct index {};

namespace types {

#define SM_FOR(i) for (int i = 0; i < size; ++i)

#define SM_ARITHMETIC(op)                                              \
  friend constexpr vec operator op(vec a, vec b) {                     \
    vec r{};                                                           \
    SM_FOR(i) r[i] = static_cast<T>(a[i] op b[i]);                     \
    return r;                                                          \
  }                                                                    \
  template <class U>                                                   \
  constexpr vec& operator op##=(const U& b) {                          \
    return *this = *this op b;                                         \
  }

#define SM_COMPARISON(op)                                  \
  friend constexpr vec<bool, size> operator op(vec a, vec b) { \
    vec<bool, size> r{};                                   \
    SM_FOR(i) r[i] = a[i] op b[i];                         \
    return r;                                              \
  }

#define SM_OPERATORS                                                                               \
  SM_ARITHMETIC(+) SM_ARITHMETIC(-) SM_ARITHMETIC(*) SM_ARITHMETIC(/)                              \
  SM_ARITHMETIC(%) SM_ARITHMETIC(&) SM_ARITHMETIC(|) SM_ARITHMETIC(^)                              \
  SM_ARITHMETIC(<<) SM_ARITHMETIC(>>)                                                              \
  SM_COMPARISON(==) SM_COMPARISON(!=) SM_COMPARISON(<) SM_COMPARISON(<=) SM_COMPARISON(>)          \
  SM_COMPARISON(>=) SM_COMPARISON(&&) SM_COMPARISON(||)                                            \
  friend constexpr vec operator+(vec a) { return a; }                                              \
  friend constexpr vec operator-(vec a) {                                                          \
    vec r{};                                                                                       \
    SM_FOR(i) r[i] = static_cast<T>(-a[i]);                                                        \
    return r;                                                                                      \
  }                                                                                                \
  friend constexpr vec operator~(vec a) {                                                          \
    vec r{};                                                                                       \
    SM_FOR(i) r[i] = static_cast<T>(~a[i]);                                                        \
    return r;                                                                                      \
  }                                                                                                \
  friend constexpr vec<bool, size> operator!(vec a) {                                              \
    vec<bool, size> r{};                                                                           \
    SM_FOR(i) r[i] = !a[i];                                                                        \
    return r;                                                                                      \
  }                                                                                                \
  constexpr vec& operator++() { return *this += T(1); }                                            \
  constexpr vec& operator--() { return *this -= T(1); }                                            \
  constexpr vec operator++(int) {                                                                  \
    vec before = *this;                                                                            \
    *this += T(1);                                                                                 \
    return before;                                                                                 \
  }                                                                                                \
  constexpr vec operator--(int) {                                                                  \
    vec before = *this;                                                                            \
    *this -= T(1);                                                                                 \
    return before;                                                                                 \
  }

// The conversion from a scalar is implicit and repeats the scalar. The conversion from a vector of another type is
// explicit. A vector can also be made from scalars and vectors with N elements in total.
#define SM_CONSTRUCTORS                                                                              \
  vec() = default;                                                                                   \
  template <class U, class = enable_t<shape<U>::scalar && !__is_same(U, T)>>                         \
  constexpr vec(const U& s) : vec(static_cast<T>(s)) {}                                              \
  template <class U, int M, class = enable_t<M == size && !__is_same(U, T)>>                         \
  constexpr explicit vec(const vec<U, M>& v) : vec(T(0)) {                                           \
    SM_FOR(i)(*this)[i] = static_cast<T>(v[i]);                                                      \
  }                                                                                                  \
  template <class U, int M, class = enable_t<M == size && !__is_same(U, T)>>                         \
  constexpr explicit vec(const packed<vec<U, M>>& v) : vec(vec<U, M>(v)) {}                          \
  template <class A, class B, class... C,                                                            \
            class = enable_t<all_numeric<A, B, C...>() && count_parts<A, B, C...>() == size>>        \
  constexpr vec(const A& a, const B& b, const C&... c) : vec(T(0)) {                                 \
    int next = 0;                                                                                    \
    using expand = int[];                                                                            \
    (void)expand{place(next, a), place(next, b), place(next, c)...};                                 \
  }                                                                                                  \
  template <class A>                                                                                 \
  constexpr int place(int& next, const A& part) {                                                    \
    return place_part(next, part, index<shape<A>::size>());                                          \
  }                                                                                                  \
  template <class A>                                                                                 \
  constexpr int place_part(int& next, const A& part, index<0>) {                                     \
    (*this)[next++] = static_cast<T>(part);                                                          \
    return 0;                                                                                        \
  }                                                                                                  \
  template <class A, int M>                                                                          \
  constexpr int place_part(int& next, const A& part, index<M>) {                                     \
    for (int i = 0; i < M; ++i)(*this)[next++] = static_cast<T>(part[i]);                            \
    return 0;                                                                                        \
  }

// Elements are named members. In a constant expression, C++ forbids indexing from one member into the next, so the
// element is selected by name.
template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  static constexpr int size = 2;
  T x, y;
  constexpr vec(T s) : x(s), y(s) {}
  constexpr vec(T x_, T y_) : x(x_), y(y_) {}
  SM_CONSTRUCTORS
  constexpr T& operator[](int i) { return __builtin_is_constant_evaluated() ? (i == 0 ? x : y) : (&x)[i]; }
  constexpr const T& operator[](int i) const { return __builtin_is_constant_evaluated() ? (i == 0 ? x : y) : (&x)[i]; }
  SM_OPERATORS
  SM_SWIZZLES(2)
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  static constexpr int size = 3;
  T x, y, z;
  constexpr vec(T s) : x(s), y(s), z(s) {}
  constexpr vec(T x_, T y_, T z_) : x(x_), y(y_), z(z_) {}
  SM_CONSTRUCTORS
  constexpr T& operator[](int i) {
    return __builtin_is_constant_evaluated() ? (i == 0 ? x : i == 1 ? y : z) : (&x)[i];
  }
  constexpr const T& operator[](int i) const {
    return __builtin_is_constant_evaluated() ? (i == 0 ? x : i == 1 ? y : z) : (&x)[i];
  }
  SM_OPERATORS
  SM_SWIZZLES(3)
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  static constexpr int size = 4;
  T x, y, z, w;
  constexpr vec(T s) : x(s), y(s), z(s), w(s) {}
  constexpr vec(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}
  SM_CONSTRUCTORS
  constexpr T& operator[](int i) {
    return __builtin_is_constant_evaluated() ? (i == 0 ? x : i == 1 ? y : i == 2 ? z : w) : (&x)[i];
  }
  constexpr const T& operator[](int i) const {
    return __builtin_is_constant_evaluated() ? (i == 0 ? x : i == 1 ? y : i == 2 ? z : w) : (&x)[i];
  }
  SM_OPERATORS
  SM_SWIZZLES(4)
};

// Packed vectors: the elements of a vector with the alignment of one element. The vector type is a template argument of
// the packed type. Argument-dependent lookup therefore also finds the vector's operators for packed operands.
#define SM_PACKED_OPERATOR(op)                         \
  template <class U>                                   \
  constexpr packed& operator op##=(const U& b) {       \
    return *this = vec<T, size>(*this) op vec<T, size>(b); \
  }

#define SM_PACKED                                                                                      \
  packed() = default;                                                                                  \
  template <class A, class B, class... C,                                                              \
            class = enable_t<all_numeric<A, B, C...>() && count_parts<A, B, C...>() == size>>          \
  constexpr packed(const A& a, const B& b, const C&... c) : packed(vec<T, size>(a, b, c...)) {}        \
  template <class U, class = enable_t<!__is_same(U, T)>>                                               \
  constexpr explicit packed(const vec<U, size>& v) : packed(vec<T, size>(v)) {}                        \
  template <class U, class = enable_t<!__is_same(U, T)>>                                               \
  constexpr explicit packed(const packed<vec<U, size>>& v) : packed(vec<T, size>(v)) {}                \
  constexpr T& operator[](int i) { return (&x)[i]; }                                                   \
  constexpr const T& operator[](int i) const { return (&x)[i]; }                                       \
  SM_PACKED_OPERATOR(+) SM_PACKED_OPERATOR(-) SM_PACKED_OPERATOR(*) SM_PACKED_OPERATOR(/)              \
  SM_PACKED_OPERATOR(%) SM_PACKED_OPERATOR(&) SM_PACKED_OPERATOR(|) SM_PACKED_OPERATOR(^)              \
  SM_PACKED_OPERATOR(<<) SM_PACKED_OPERATOR(>>)

template <class T>
struct packed<vec<T, 2>> {
  static constexpr int size = 2;
  T x, y;
  constexpr packed(T s) : x(s), y(s) {}
  constexpr packed(vec<T, 2> v) : x(v.x), y(v.y) {}
  constexpr operator vec<T, 2>() const { return vec<T, 2>(x, y); }
  SM_PACKED
  SM_SWIZZLES(2)
};

template <class T>
struct packed<vec<T, 3>> {
  static constexpr int size = 3;
  T x, y, z;
  constexpr packed(T s) : x(s), y(s), z(s) {}
  constexpr packed(vec<T, 3> v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator vec<T, 3>() const { return vec<T, 3>(x, y, z); }
  SM_PACKED
  SM_SWIZZLES(3)
};

template <class T>
struct packed<vec<T, 4>> {
  static constexpr int size = 4;
  T x, y, z, w;
  constexpr packed(T s) : x(s), y(s), z(s), w(s) {}
  constexpr packed(vec<T, 4> v) : x(v.x), y(v.y), z(v.z), w(v.w) {}
  constexpr operator vec<T, 4>() const { return vec<T, 4>(x, y, z, w); }
  SM_PACKED
  SM_SWIZZLES(4)
};

#undef SM_PACKED
#undef SM_PACKED_OPERATOR
#undef SM_CONSTRUCTORS
#undef SM_OPERATORS
#undef SM_COMPARISON
#undef SM_ARITHMETIC
#undef SM_FOR

}  // namespace types
}  // namespace sm
