// Functions of floating-point numbers. Each type and width has its own overload. A template would accept a call with
// two different types, which Metal refuses as ambiguous.
#pragma once

#define SM_WIDTHS(T, M, name) M(T, name) M(T##2, name) M(T##3, name) M(T##4, name)
#define SM_ON_FLOATS(M, name) SM_FLOATS(SM_WIDTHS, M, name)
#define SM_ON_INTEGERS(M, name) SM_INTEGERS(SM_WIDTHS, M, name)
#define SM_F1(T, name) T name(T);
#define SM_F2(T, name) T name(T, T);
#define SM_F3(T, name) T name(T, T, T);

#define SM_MATH_1(name) SM_ON_FLOATS(SM_F1, name)
#define SM_MATH_2(name) SM_ON_FLOATS(SM_F2, name)
#define SM_MATH_3(name) SM_ON_FLOATS(SM_F3, name)
#define SM_FLOAT_FUNCTIONS                                                                                             \
  SM_MATH_1(acos)                                                                                                      \
  SM_MATH_1(acosh) SM_MATH_1(asin) SM_MATH_1(asinh) SM_MATH_1(atan) SM_MATH_1(atanh) SM_MATH_1(ceil) SM_MATH_1(cos)    \
      SM_MATH_1(cosh) SM_MATH_1(cospi) SM_MATH_1(exp) SM_MATH_1(exp2) SM_MATH_1(exp10) SM_MATH_1(fabs)                 \
          SM_MATH_1(floor) SM_MATH_1(fract) SM_MATH_1(log) SM_MATH_1(log2) SM_MATH_1(log10) SM_MATH_1(rint)            \
              SM_MATH_1(round) SM_MATH_1(rsqrt) SM_MATH_1(sin) SM_MATH_1(sinh) SM_MATH_1(sinpi) SM_MATH_1(sqrt)        \
                  SM_MATH_1(tan) SM_MATH_1(tanh) SM_MATH_1(tanpi) SM_MATH_1(trunc) SM_MATH_1(saturate) SM_MATH_1(sign) \
                      SM_MATH_1(abs) SM_MATH_2(atan2) SM_MATH_2(copysign) SM_MATH_2(fdim) SM_MATH_2(fmax)              \
                          SM_MATH_2(fmin) SM_MATH_2(fmod) SM_MATH_2(pow) SM_MATH_2(powr) SM_MATH_2(step)               \
                              SM_MATH_2(divide) SM_MATH_2(nextafter) SM_MATH_2(min) SM_MATH_2(max) SM_MATH_3(fma)      \
                                  SM_MATH_3(mad) SM_MATH_3(mix) SM_MATH_3(smoothstep) SM_MATH_3(clamp)                 \
                                      SM_MATH_3(fmin3) SM_MATH_3(fmax3) SM_MATH_3(fmedian3)                            \
                                          SM_FLOATS(SM_WITH_REFERENCES) SM_FLOATS(SM_GEOMETRY)
// ldexp takes any integer. frexp and modf also write a result through a reference to thread memory.
#define SM_EXPONENTS(T, I)   \
  T ldexp(T, I);             \
  T frexp(T, __private I&);  \
  T modf(T, __private T&);   \
  T sincos(T, __private T&); \
  I ilogb(T);
#define SM_WITH_REFERENCES(T) \
  SM_EXPONENTS(T, int) SM_EXPONENTS(T##2, int2) SM_EXPONENTS(T##3, int3) SM_EXPONENTS(T##4, int4)
#define SM_GEOMETRY(T) SM_LENGTHS(T, T##2) SM_LENGTHS(T, T##3) SM_LENGTHS(T, T##4) T##3 cross(T##3, T##3);
#define SM_LENGTHS(T, V)    \
  T dot(V, V);              \
  T length(V);              \
  T length_squared(V);      \
  T distance(V, V);         \
  T distance_squared(V, V); \
  V normalize(V);           \
  V reflect(V, V);          \
  V refract(V, V, T);       \
  V faceforward(V, V, V);

namespace metal {

SM_FLOAT_FUNCTIONS
namespace precise {
SM_FLOAT_FUNCTIONS
}
namespace fast {
SM_FLOAT_FUNCTIONS
}
SM_MATH_3(min3)
SM_MATH_3(max3)
SM_MATH_3(median3)

}  // namespace metal
