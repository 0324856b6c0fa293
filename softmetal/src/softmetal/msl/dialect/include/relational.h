// Tests of floating-point values, select, all, any.
#pragma once

#define SM_TEST_1(T, name) \
  bool name(T);            \
  int2 name(T##2);         \
  int3 name(T##3);         \
  int4 name(T##4);
#define SM_TEST_2(T, name) \
  bool name(T, T);         \
  int2 name(T##2, T##2);   \
  int3 name(T##3, T##3);   \
  int4 name(T##4, T##4);
#define SM_TESTS                                                                                                       \
  SM_FLOATS(SM_TEST_1, isfinite)                                                                                       \
  SM_FLOATS(SM_TEST_1, isinf) SM_FLOATS(SM_TEST_1, isnan) SM_FLOATS(SM_TEST_1, isnormal) SM_FLOATS(SM_TEST_1, signbit) \
      SM_FLOATS(SM_TEST_2, isordered) SM_FLOATS(SM_TEST_2, isunordered)

namespace metal {

SM_TESTS
namespace precise {
SM_TESTS
}
namespace fast {
SM_TESTS
}
inline bool all(bool x) {
  return x;
}
inline bool any(bool x) {
  return x;
}
template <typename T, int N>
bool all(vec<T, N>);
template <typename T, int N>
bool any(vec<T, N>);

#define SM_SELECT(T)    \
  T select(T, T, bool); \
  SM_SELECT_VECTOR(T##2, 2) SM_SELECT_VECTOR(T##3, 3) SM_SELECT_VECTOR(T##4, 4)
#define SM_SELECT_VECTOR(V, N) \
  V select(V, V, bool);        \
  template <typename C>        \
  V select(V, V, vec<C, N>);
SM_FLOATS(SM_SELECT)
SM_INTEGERS(SM_SELECT)
bool select(bool, bool, bool);

}  // namespace metal
