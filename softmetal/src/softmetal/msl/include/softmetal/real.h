// Scalar floating-point functions. If Metal specifies a function as correctly rounded, it is exact here. All other
// results get a seeded error within Metal's limit, so that no caller can rely on more accuracy. Source: MSL
// specification, section 8, the tables of accuracy for single precision with and without fast math, and for half
// precision (1 ulp).
#pragma once

#include <metal_relational>

namespace sm {

// 3000 ulps of single precision are 0.37 ulp of half. Together with the final rounding, the error is below 1 ulp.
METAL_FUNC half inexact_half(float x) {
  float size = __builtin_fabsf(x);
  return static_cast<half>(size < 65472.0f ? sm_perturb(x, 3000.0f) : x);
}
METAL_FUNC float within_one(float x) { return __builtin_fminf(1.0f, __builtin_fmaxf(-1.0f, x)); }
// Adds an absolute error below 2^-13 to values of magnitude at most 1.
METAL_FUNC float inexact_absolute(float x) {
  float base = 1.0f + 0.5f * __builtin_fabsf(x);
  return within_one(x + (sm_perturb(base, 1000.0f) - base));
}

// The fast logarithms have an absolute error below 2^-21 for x in [0.5, 2], where the result may be close to zero.
// Elsewhere their error is 3 ulps. `base` is between 1 and 2, so its ulp is 2^-23.
METAL_FUNC float fast_log(float x, float y) {
  if (x < 0.5f || x > 2.0f) return sm_perturb(y, 2.0f);
  float base = 1.0f + 0.5f * __builtin_fabsf(y);
  return y + (sm_perturb(base, 3.0f) - base);
}

inline double sin_pi(float x) {
  double r = x - 2 * __builtin_rint(x * 0.5);
  return __builtin_fabs(r) == 1 ? 0 * r : __builtin_sin(3.14159265358979323846 * r);
}
inline double cos_pi(float x) {
  double r = __builtin_fabs(x - 2 * __builtin_rint(x * 0.5));
  return r == 0.5 ? 0 : __builtin_cos(3.14159265358979323846 * r);
}
inline double tan_pi(float x) {
  double r = x - __builtin_rint(static_cast<double>(x));
  return __builtin_fabs(r) == 0.5 ? __builtin_copysign(__builtin_inf(), r) : __builtin_tan(3.14159265358979323846 * r);
}

// Defines a function. `value` is its nearly exact result, to which a seeded error is added. The error of `value` itself
// is half an ulp of single precision or little more, so sm_perturb gets fewer ulps than Metal's limit. No error is
// added to results that are not finite, nor to results for x = 0, which C99 specifies exactly.
#define SM_REAL_1(name, value, precise_result, fast_result, half_result)             \
  template <class Mode>                                                              \
  struct name##_f {                                                                  \
    METAL_FUNC static float exact(float x) { return static_cast<float>(value); }     \
    METAL_FUNC static float settle(float x, float y, precise_mode) {                 \
      (void)x;                                                                       \
      return precise_result;                                                         \
    }                                                                                \
    METAL_FUNC static float settle(float x, float y, fast_mode) {                    \
      (void)x;                                                                       \
      return fast_result;                                                            \
    }                                                                                \
    METAL_FUNC static float of(float x) {                                            \
      float y = exact(x);                                                            \
      return x == 0.0f || !isfinite_f::of(y) ? y : settle(x, y, Mode());             \
    }                                                                                \
    METAL_FUNC static half of(half x) {                                              \
      float y = exact(static_cast<float>(x));                                        \
      return static_cast<float>(x) == 0.0f || !isfinite_f::of(y) ? static_cast<half>(y) : half_result;     \
    }                                                                                \
  };

#define SM_ULPS(n) sm_perturb(y, n)
SM_REAL_1(acos, __builtin_acos(static_cast<double>(x)), SM_ULPS(3), SM_ULPS(4), inexact_half(y))
SM_REAL_1(acosh, __builtin_acosh(static_cast<double>(x)), SM_ULPS(3), SM_ULPS(4), inexact_half(y))
SM_REAL_1(asin, __builtin_asin(static_cast<double>(x)), SM_ULPS(3), SM_ULPS(4), inexact_half(y))
SM_REAL_1(asinh, __builtin_asinh(static_cast<double>(x)), SM_ULPS(3), SM_ULPS(4), inexact_half(y))
SM_REAL_1(atan, __builtin_atan(static_cast<double>(x)), SM_ULPS(4), SM_ULPS(4), inexact_half(y))
SM_REAL_1(atanh, __builtin_atanh(static_cast<double>(x)), SM_ULPS(4), SM_ULPS(4), inexact_half(y))
SM_REAL_1(cos, __builtin_cosf(x), within_one(SM_ULPS(3)), inexact_absolute(y), inexact_half(y))
SM_REAL_1(cosh, __builtin_cosh(static_cast<double>(x)), SM_ULPS(3), SM_ULPS(4), inexact_half(y))
SM_REAL_1(cospi, cos_pi(x), within_one(SM_ULPS(3)), inexact_absolute(y), inexact_half(y))
SM_REAL_1(exp, __builtin_expf(x), SM_ULPS(3), SM_ULPS(2 + __builtin_floorf(__builtin_fabsf(2 * x))), inexact_half(y))
SM_REAL_1(exp2, __builtin_exp2f(x), SM_ULPS(3), SM_ULPS(2 + __builtin_floorf(__builtin_fabsf(2 * x))), inexact_half(y))
SM_REAL_1(exp10, __builtin_pow(10.0, static_cast<double>(x)), SM_ULPS(3), SM_ULPS(2 + __builtin_floorf(__builtin_fabsf(6.6f * x))), inexact_half(y))
SM_REAL_1(log, __builtin_logf(x), SM_ULPS(3), fast_log(x, y), inexact_half(y))
SM_REAL_1(log2, __builtin_log2f(x), SM_ULPS(3), fast_log(x, y), inexact_half(y))
SM_REAL_1(log10, __builtin_log10(static_cast<double>(x)), SM_ULPS(3), fast_log(x, y), inexact_half(y))
SM_REAL_1(sin, __builtin_sinf(x), within_one(SM_ULPS(3)), inexact_absolute(y), inexact_half(y))
SM_REAL_1(sinh, __builtin_sinh(static_cast<double>(x)), SM_ULPS(3), SM_ULPS(4), inexact_half(y))
SM_REAL_1(sinpi, sin_pi(x), within_one(SM_ULPS(3)), inexact_absolute(y), inexact_half(y))
SM_REAL_1(tan, __builtin_tan(static_cast<double>(x)), SM_ULPS(5), SM_ULPS(5), inexact_half(y))
SM_REAL_1(tanh, __builtin_tanh(static_cast<double>(x)), within_one(SM_ULPS(4)), within_one(SM_ULPS(4)), inexact_half(y))
SM_REAL_1(tanpi, tan_pi(x), SM_ULPS(5), SM_ULPS(5), inexact_half(y))
SM_REAL_1(sqrt, __builtin_sqrtf(x), y, SM_ULPS(2), static_cast<half>(y))
SM_REAL_1(rsqrt, 1.0 / __builtin_sqrt(static_cast<double>(x)), y, SM_ULPS(1), static_cast<half>(y))
#undef SM_REAL_1

// Functions of two arguments. pow(x, 0) and pow(1, y) are exact.
template <class Mode>
struct pow_f {
  METAL_FUNC static float settle(float, float, float z, precise_mode) { return sm_perturb(z, 15.0f); }
  METAL_FUNC static float settle(float x, float y, float z, fast_mode) {
    return sm_perturb(z, 2 + __builtin_floorf(__builtin_fabsf(2 * y * __builtin_log2f(__builtin_fabsf(x)))));
  }
  METAL_FUNC static float of(float x, float y) {
    float z = __builtin_powf(x, y);
    return x == 1.0f || x == 0.0f || y == 0.0f || !isfinite_f::of(z) ? z : settle(x, y, z, Mode());
  }
  METAL_FUNC static half of(half x, half y) {
    float z = __builtin_powf(x, y);
    return x == half(1.0f) || x == half(0.0f) || y == half(0.0f) || !isfinite_f::of(z) ? static_cast<half>(z) : inexact_half(z);
  }
};
template <class Mode>
struct powr_f {  // defined for x >= 0
  template <class T>
  METAL_FUNC static T of(T x, T y) {
    return x < T(0.0f) ? static_cast<T>(__builtin_nanf("")) : pow_f<Mode>::of(x, y);
  }
};
template <class Mode>
struct atan2_f {
  METAL_FUNC static float of(float y, float x) {
    float z = static_cast<float>(__builtin_atan2(static_cast<double>(y), static_cast<double>(x)));
    return y == 0.0f ? z : sm_perturb(z, 4.0f);
  }
  METAL_FUNC static half of(half y, half x) {
    float z = static_cast<float>(__builtin_atan2(static_cast<double>(y), static_cast<double>(x)));
    return y == half(0.0f) ? static_cast<half>(z) : inexact_half(z);
  }
};
template <class Mode>
struct divide_f {
  METAL_FUNC static float settle(float z, precise_mode) { return z; }
  METAL_FUNC static float settle(float z, fast_mode) { return isfinite_f::of(z) ? sm_perturb(z, 2.0f) : z; }
  METAL_FUNC static float of(float x, float y) { return settle(x / y, Mode()); }
  METAL_FUNC static half of(half x, half y) { return x / y; }
};

// Exact functions, computed in float. A half is widened to float, because float represents every result exactly.
#define SM_EXACT_1(name, builtin)                                                                     \
  struct name##_f {                                                                                   \
    METAL_FUNC static float of(float x) { return builtin(x); }                                        \
    METAL_FUNC static half of(half x) { return static_cast<half>(builtin(static_cast<float>(x))); }   \
  };
SM_EXACT_1(ceil, __builtin_ceilf)
SM_EXACT_1(floor, __builtin_floorf)
SM_EXACT_1(rint, __builtin_rintf)
SM_EXACT_1(round, __builtin_roundf)
SM_EXACT_1(trunc, __builtin_truncf)
#undef SM_EXACT_1

#define SM_EXACT_2(name, builtin)                                                  \
  struct name##_f {                                                                \
    METAL_FUNC static float of(float x, float y) { return builtin(x, y); }         \
    METAL_FUNC static half of(half x, half y) {                                    \
      return static_cast<half>(builtin(static_cast<float>(x), static_cast<float>(y))); \
    }                                                                              \
  };
SM_EXACT_2(fmod, __builtin_fmodf)
SM_EXACT_2(fdim, __builtin_fdimf)
#undef SM_EXACT_2

struct fabs_f {  // clears only the sign bit of x, so that subnormals are not flushed
  METAL_FUNC static float of(float x) { return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) & 0x7fffffffu); }
  METAL_FUNC static half of(half x) {
    return __builtin_bit_cast(half, static_cast<uint16_t>(__builtin_bit_cast(uint16_t, x) & 0x7fffu));
  }
};
struct copysign_f {
  METAL_FUNC static float of(float x, float y) {
    return __builtin_bit_cast(float, (__builtin_bit_cast(uint32_t, x) & 0x7fffffffu) |
                                         (__builtin_bit_cast(uint32_t, y) & 0x80000000u));
  }
  METAL_FUNC static half of(half x, half y) {
    return __builtin_bit_cast(half, static_cast<uint16_t>((__builtin_bit_cast(uint16_t, x) & 0x7fffu) |
                                                          (__builtin_bit_cast(uint16_t, y) & 0x8000u)));
  }
};
struct fract_f {
  METAL_FUNC static float of(float x) {
    return isinf_f::of(x) ? __builtin_copysignf(0.0f, x) : x != x ? x : __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f);
  }
  METAL_FUNC static half of(half x) {
    float f = static_cast<float>(x);
    return isinf_f::of(x) ? static_cast<half>(__builtin_copysignf(0.0f, f))
           : x != x       ? x
                          : static_cast<half>(__builtin_fminf(f - __builtin_floorf(f), 0x1.ffcp-1f));
  }
};
struct fma_f {
  METAL_FUNC static float of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  // The product is exact in single precision. The sum is rounded to odd, so that the conversion to half rounds the
  // exact sum correctly.
  METAL_FUNC static half of(half a, half b, half c) {
#pragma clang fp contract(off)
    float p = static_cast<float>(a) * static_cast<float>(b), z = static_cast<float>(c);
    float s = p + z, t = s - p;
    float error = (p - (s - t)) + (z - t);
    uint32_t bits = __builtin_bit_cast(uint32_t, s);
    if (isfinite_f::of(s) && error != 0.0f && !(bits & 1)) bits += (error > 0.0f) == (s > 0.0f) ? 1u : ~0u;
    return static_cast<half>(__builtin_bit_cast(float, bits));
  }
};
struct nextafter_f {
  METAL_FUNC static float of(float x, float y) { return __builtin_nextafterf(x, y); }
  METAL_FUNC static half of(half x, half y) {
    if (x != x || y != y) return x + y;
    if (x == y) return y;
    uint16_t bits = __builtin_bit_cast(uint16_t, x);
    if (!(bits & 0x7fff)) return __builtin_bit_cast(half, static_cast<uint16_t>(y > x ? 0x0001 : 0x8001));
    bits = static_cast<uint16_t>((y > x) == !(bits >> 15) ? bits + 1 : bits - 1);
    return __builtin_bit_cast(half, bits);
  }
};
struct ldexp_f {
  METAL_FUNC static float of(float x, int k) { return __builtin_ldexpf(x, k); }
  METAL_FUNC static half of(half x, int k) {
    return static_cast<half>(__builtin_ldexpf(static_cast<float>(x), k < -60 ? -60 : k > 60 ? 60 : k));
  }
};
struct ilogb_f {
  METAL_FUNC static int of(float x) { return isinf_f::of(x) ? INT_MAX : __builtin_ilogbf(x); }
};

template <class T>
METAL_FUNC T frexp_scalar(T x, int& exponent) {
  exponent = 0;
  if (x == T(0.0f) || !isfinite_f::of(x)) return x;
  return static_cast<T>(__builtin_frexpf(static_cast<float>(x), &exponent));
}

}  // namespace sm
