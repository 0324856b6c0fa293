// Construction of vectors, matrices, as_type.
#pragma once

namespace metal {

// Rewritten source calls sm_make<T4>(...) for T4(...), because a vector of C++ for OpenCL can be made only from braces
// or from one scalar.
template <typename V>
struct sm_maker;
template <typename... A>
struct sm_total {
  enum { width = 0 };
};
template <typename A, typename... B>
struct sm_total<A, B...> {
  enum { width = int(sm_number<A>::width) + int(sm_total<B...>::width) };
};
template <typename T, int N>
struct sm_maker<vec<T, N>> {
  typedef vec<T, N> V;
  static constexpr V of() { return V(T(0)); }
  template <typename S, enable_if_t<__is_arithmetic(S) || __is_enum(S), int> = 0>
  static constexpr V of(S x) {
    return V(T(x));
  }
  template <typename S>
  static V of(vec<S, N>);
  template <typename S, enable_if_t<__is_class(S) && __is_convertible_to(S, T), int> = 0>
  static V of(S);
  template <typename A, typename... B,
            enable_if_t<int(sm_total<A, B...>::width) == N && sizeof...(B) + 1 == N, int> = 0>
  static constexpr V of(A a, B... b) {
    return V{T(a), T(b)...};
  }
  template <typename A, typename B, typename... C,
            enable_if_t<int(sm_total<A, B, C...>::width) == N && sizeof...(C) + 2 != N, int> = 0>
  static V of(A, B, C...);
};
template <typename T>
struct sm_maker<const T> : sm_maker<T> {};
template <typename T>
struct sm_maker {
  template <typename... A>
  static constexpr T of(A... a) {
    return T(a...);
  }
};
template <typename V, typename... A>
constexpr V sm_make(A... a) {
  return sm_maker<V>::of(a...);
}

template <typename T, int C, int R>
struct matrix {
  vec<T, R> columns[C];
  matrix() = default;
  explicit matrix(T);
  template <typename... A, enable_if_t<(sizeof...(A) > 1), int> = 0>
  matrix(A...);
  template <typename U>
  explicit matrix(matrix<U, C, R>);
#define SM_ELEMENT(space)                 \
  space vec<T, R>& operator[](int) space; \
  space matrix& operator+=(matrix) space; \
  space matrix& operator-=(matrix) space; \
  space matrix& operator*=(matrix) space; \
  space matrix& operator*=(T) space;      \
  space matrix& operator/=(T) space;      \
  const space vec<T, R>& operator[](int) const space;
  SM_ELEMENT(__private)
  SM_ELEMENT(__global)
  SM_ELEMENT(__local)
#undef SM_ELEMENT
  const __constant vec<T, R>& operator[](int) const __constant;
};
template <typename T, int C, int R>
vec<T, R> operator*(matrix<T, C, R>, vec<T, C>);
template <typename T, int C, int R>
vec<T, C> operator*(vec<T, R>, matrix<T, C, R>);
template <typename T, int C, int R>
matrix<T, C, R> operator*(matrix<T, C, R>, T);
template <typename T, int C, int R>
matrix<T, C, R> operator*(T, matrix<T, C, R>);
template <typename T, int C, int R>
matrix<T, C, R> operator+(matrix<T, C, R>, matrix<T, C, R>);
template <typename T, int C, int R>
matrix<T, C, R> operator-(matrix<T, C, R>, matrix<T, C, R>);
template <typename T, int C, int R>
matrix<T, C, R> operator-(matrix<T, C, R>);
template <typename T, int C, int R>
matrix<T, C, R> operator/(matrix<T, C, R>, T);
template <typename T, int C, int R>
bool operator==(matrix<T, C, R>, matrix<T, C, R>);
template <typename T, int C, int R>
bool operator!=(matrix<T, C, R>, matrix<T, C, R>);
template <typename T, int C, int R, int K>
matrix<T, K, R> operator*(matrix<T, C, R>, matrix<T, K, C>);
template <typename T, int C, int R>
matrix<T, R, C> transpose(matrix<T, C, R>);
template <typename T, int N>
T determinant(matrix<T, N, N>);

template <typename To, typename From>
constexpr To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: both types must have the same size");
  return To();
}

}  // namespace metal

using metal::as_type;
#define SM_MATRICES(T)                   \
  typedef metal::matrix<T, 2, 2> T##2x2; \
  typedef metal::matrix<T, 2, 3> T##2x3; \
  typedef metal::matrix<T, 2, 4> T##2x4; \
  typedef metal::matrix<T, 3, 2> T##3x2; \
  typedef metal::matrix<T, 3, 3> T##3x3; \
  typedef metal::matrix<T, 3, 4> T##3x4; \
  typedef metal::matrix<T, 4, 2> T##4x2; \
  typedef metal::matrix<T, 4, 3> T##4x3; \
  typedef metal::matrix<T, 4, 4> T##4x4;
SM_MATRICES(float)
SM_MATRICES(half)
#undef SM_MATRICES
