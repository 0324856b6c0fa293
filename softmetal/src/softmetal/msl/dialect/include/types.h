// Scalar types, vectors and packed vectors.
#pragma once

#include "../../include/softmetal/constants.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __INTPTR_TYPE__ intptr_t;
typedef __UINTPTR_TYPE__ uintptr_t;

#if SM_METAL_VERSION >= 310
typedef __bf16 bfloat;
#define SM_BFLOAT(M, ...) M(bfloat, ##__VA_ARGS__)
#else
#define SM_BFLOAT(M, ...)
#endif
#define SM_FLOATS(M, ...) M(float, ##__VA_ARGS__) M(half, ##__VA_ARGS__) SM_BFLOAT(M, ##__VA_ARGS__)
#define SM_INTEGERS_32(M, ...)                                                                   \
  M(char, ##__VA_ARGS__)                                                                         \
  M(uchar, ##__VA_ARGS__) M(short, ##__VA_ARGS__) M(ushort, ##__VA_ARGS__) M(int, ##__VA_ARGS__) \
      M(uint, ##__VA_ARGS__)
#define SM_INTEGERS(M, ...) SM_INTEGERS_32(M, ##__VA_ARGS__) M(long, ##__VA_ARGS__) M(ulong, ##__VA_ARGS__)

#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_ASM
#define METAL_CONST
#define METAL_PURE
#define METAL_INTERNAL
#define METAL_VALID_ARGS(...)
#define METAL_CONST_ARG(...)
// When the source is compiled, it is unknown whether a pipeline sets a function constant. The result is therefore no
// constant expression.
bool sm_is_defined();
#define is_function_constant_defined(name) sm_is_defined()
#define assert(...) ((void)(__VA_ARGS__))

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// For type rules, a packed vector is a vector. Its different alignment and size matter only for code generation.
template <typename T, int N>
using packed_vec = vec<T, N>;
typedef float float_t;
typedef half half_t;

}  // namespace metal

#define SM_VECTORS(T)                     \
  typedef metal::vec<T, 2> T##2;          \
  typedef metal::vec<T, 3> T##3;          \
  typedef metal::vec<T, 4> T##4;          \
  typedef metal::vec<T, 2> packed_##T##2; \
  typedef metal::vec<T, 3> packed_##T##3; \
  typedef metal::vec<T, 4> packed_##T##4;
SM_FLOATS(SM_VECTORS)
SM_INTEGERS(SM_VECTORS)
#undef SM_VECTORS
// C++ for OpenCL has no vectors of bool. In it, the result of a comparison is a vector of integers as wide as the
// operands.
typedef metal::vec<char, 2> bool2;
typedef metal::vec<char, 3> bool3;
typedef metal::vec<char, 4> bool4;
typedef bool2 packed_bool2;
typedef bool3 packed_bool3;
typedef bool4 packed_bool4;
