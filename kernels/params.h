// Constants and structs that shaders and host share. Plain C subset: no std, fixed-width integers, ASCII.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#define MARLIN_CONSTANT constant
#else
#include <cstdint>
#define MARLIN_CONSTANT
#endif

namespace marlin {

// Weights are 4 bit: a packed word holds eight consecutive k of one column, lowest k in the lowest nibble.
enum { kCodesPerWord = 8 };

enum class WeightFormat : int32_t {
  uint4b8 = 0,
  uint4 = 1,
  uint4_bias = 2,
  float4_e2m1 = 3,
  nvfp4 = 4,
  mxfp4 = 5,
  lut4 = 6,
};
enum { kWeightFormatCount = 7 };

// Element types of activations, scales, zeros and bias as they are in memory.
enum class ElementType : int32_t {
  float16 = 0,
  bfloat16 = 1,
  float32 = 2,
  uint8 = 3,
};

}  // namespace marlin
