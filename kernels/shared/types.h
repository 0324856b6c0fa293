// Types and arithmetic that shaders and host share. The code uses only what both languages accept: no std, fixed-width
// integers, ASCII.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

namespace marlin {

// A packed word holds the 4-bit codes of eight consecutive k of one column, with the lowest k in the lowest nibble.
enum { kCodesPerWord = 8, kLutSize = 16 };

enum { kSimdWidth = 32 };

// Bytes of threadgroup memory of a threadgroup: Metal's limit, and an amount of which the threadgroup memory of an M1
// core (60 KB) holds three. Registers may allow fewer.
enum { kMaxThreadgroupBytes = 32 * 1024, kPreferredThreadgroupBytes = 20 * 1024 };

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

// How a 4-bit code is decoded: as an integer, as OCP E2M1, or by a table lookup.
enum class CodeKind : int32_t { integer = 0, e2m1 = 1, table = 2 };
enum { kCodeKindCount = 3 };

constexpr CodeKind code_kind(WeightFormat format) {
  return format == WeightFormat::lut4 ? CodeKind::table
         : format == WeightFormat::float4_e2m1 || format == WeightFormat::nvfp4 || format == WeightFormat::mxfp4
             ? CodeKind::e2m1
             : CodeKind::integer;
}

// Element types of activations, scales, zeros and bias in memory.
enum class ElementType : int32_t {
  float16 = 0,
  bfloat16 = 1,
  float32 = 2,
  uint8 = 3,
};

constexpr uint32_t element_bytes(ElementType type) {
  return type == ElementType::float32 ? 4 : type == ElementType::uint8 ? 1 : 2;
}

// How gptq_unpack_zeros computes a zero point from the value that a GPTQ checkpoint stores.
enum class StoredZeros : int32_t {
  plain = 0,     // checkpoint version 2: as stored
  word = 1,      // version 1: 0x11111111 is added to the packed word
  masked = 2,    // version 1: (stored + 1) & 15
  unmasked = 3,  // version 1: stored + 1
};

constexpr uint32_t ceil_divide(uint32_t a, uint32_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

constexpr uint32_t round_up(uint32_t value, uint32_t multiple) {
  return ceil_divide(value, multiple) * multiple;
}

}  // namespace marlin
