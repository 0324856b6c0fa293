// Declares the function constants, which specialize a pipeline, and loads elements whose type is a function constant.
#pragma once

#include "kernels/gemm/geometry.h"

#define MARLIN_INLINE inline __attribute__((always_inline))
// Arrays stay in registers only if the compiler knows every index.
#define MARLIN_UNROLL _Pragma("clang loop unroll(full)")

#define MARLIN_DECLARE_CONSTANT(index, type, shader_name, name) constant type shader_name [[function_constant(index)]];
MARLIN_FUNCTION_CONSTANTS(MARLIN_DECLARE_CONSTANT)
#undef MARLIN_DECLARE_CONSTANT

namespace marlin {

using namespace metal;

MARLIN_INLINE float load_element(const device uchar* data, ulong index, int type) {
  if (type == int(ElementType::float16)) return float(reinterpret_cast<const device half*>(data)[index]);
  if (type == int(ElementType::bfloat16)) return float(reinterpret_cast<const device bfloat*>(data)[index]);
  if (type == int(ElementType::float32)) return reinterpret_cast<const device float*>(data)[index];
  if (type == int(ElementType::int8)) return float(reinterpret_cast<const device char*>(data)[index]);
  return float(data[index]);
}

}  // namespace marlin
