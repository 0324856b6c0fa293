// Constants and structs that shaders and host share. Plain C subset: no std, fixed-width integers, ASCII.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

namespace marlin {

// Weights are 4 bit: a packed word holds eight consecutive k of one column, lowest k in the lowest nibble.
enum { kCodesPerWord = 8, kLutSize = 16 };

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

constexpr uint32_t element_bytes(ElementType type) {
  return type == ElementType::float32 ? 4 : type == ElementType::uint8 ? 1 : 2;
}

constexpr uint32_t ceil_divide(uint32_t a, uint32_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

// One numbering of buffers for all kernels; variants.h says which of them each kernel declares. Every declared slot is
// bound: for an absent optional any live buffer serves, the kernel does not read it.
enum BufferSlot {
  kSlotA = 0,            // [M, K], row stride in GemmParams, unit stride in k
  kSlotPacked = 1,       // int32 [K/8, N]; the input words of the repack and unpack kernels
  kSlotScales = 2,       // [G, N]
  kSlotZeros = 3,        // [G, N]
  kSlotGlobalScale = 4,  // float [1] or [N]
  kSlotLut = 5,          // float [16]
  kSlotPerm = 6,         // int32 [K]
  kSlotBias = 7,         // [N]
  kSlotOut = 8,
  kSlotPartials = 9,  // float [slices, M, N]
  kSlotParams = 10,
  // The mLSTM kernels number theirs in mlstm_params.h, up to the same count.
  kSlotCount = 20,
};

// Function constants: X(index, Metal type, name in shaders, name here). Every pipeline is given all of them; a kernel
// ignores those that it does not read. The types are ElementTypes.
//   vector_columns          N is a multiple of 4 and the first packed word is 16-byte aligned
//   vector_activations      no perm; the first activation is aligned to 4 elements, the row stride a multiple of 4
//   rows_per_threadgroup    activation rows of a gemv threadgroup, 1 to kGemvMaxRows
//   subnormal_codes         gemv reads codes as half subnormals: where probe_half_subnormals says that they live, and
//                           activations are fp16 (a small bf16 or fp32 one times 2^-24 would be flushed)
//   writes_partials         the K slices of the grid go to kSlotPartials and wait for reduce
#define MARLIN_FUNCTION_CONSTANTS(X)                        \
  X(0, bool, has_perm, HasPerm)                             \
  X(1, bool, has_bias, HasBias)                             \
  X(2, bool, has_global_scale, HasGlobalScale)              \
  X(3, bool, global_scale_per_column, GlobalScalePerColumn) \
  X(4, int, scales_type, ScalesType)                        \
  X(5, int, zeros_type, ZerosType)                          \
  X(6, int, bias_type, BiasType)                            \
  X(7, bool, vector_columns, VectorColumns)                 \
  X(8, bool, vector_activations, VectorActivations)         \
  X(9, int, rows_per_threadgroup, Rows)                     \
  X(10, bool, subnormal_codes, SubnormalCodes)              \
  X(11, bool, writes_partials, WritesPartials)

enum FunctionConstant {
#define MARLIN_CONSTANT_INDEX(index, type, shader_name, name) kConstant##name = index,
  MARLIN_FUNCTION_CONSTANTS(MARLIN_CONSTANT_INDEX)
#undef MARLIN_CONSTANT_INDEX
      kFunctionConstantCount = 12,
};

// gemv and gemm. A slice is the part of K of one simdgroup (gemv) or of one threadgroup (gemm).
struct GemmParams {
  int64_t a_row_stride;  // elements
  uint32_t M;
  uint32_t N;
  uint32_t K;
  uint32_t group_size;  // a multiple of 8; at most K
  uint32_t k_per_slice;
  uint32_t unused;
};
static_assert(sizeof(GemmParams) == 32, "shared with the shaders");

struct DequantizeParams {
  uint32_t N;
  uint32_t K;
  uint32_t group_size;
  uint32_t unused;
};
static_assert(sizeof(DequantizeParams) == 16, "shared with the shaders");

// out[m, n] = round(sum over slices of partials[slice, m, n] + bias[n])
struct ReduceParams {
  uint32_t M;
  uint32_t N;
  uint32_t slices;
  uint32_t unused;
};
static_assert(sizeof(ReduceParams) == 16, "shared with the shaders");

// How a stored GPTQ zero point becomes the zero point (see gptq_unpack_zeros).
enum class StoredZeros : int32_t {
  plain = 0,     // checkpoint version 2
  word = 1,      // 0x11111111 is added to the word
  masked = 2,    // (stored + 1) & 15
  unmasked = 3,  // stored + 1
};

struct RepackParams {
  uint32_t rows;     // of the kernel's grid, see variants.h
  uint32_t columns;  // of the kernel's grid
  int32_t stored_zeros;
  uint32_t unused;
};
static_assert(sizeof(RepackParams) == 16, "shared with the shaders");

// repack, dequantize and reduce: one thread per element of a (columns, rows) grid, in groups of this shape.
enum { kElementwiseWidth = 64, kElementwiseHeight = 4 };

// gemv: a lane owns 4 columns, a simdgroup 128; its threadgroup splits a range of K between its simdgroups.
enum {
  kSimdWidth = 32,
  kGemvColumnsPerLane = 4,
  kGemvColumns = kSimdWidth * kGemvColumnsPerLane,
  kGemvMaxRows = 4,
  kGemvMaxSimdgroups = 16,
};

constexpr uint32_t gemv_threadgroup_bytes(uint32_t rows, uint32_t simdgroups) {
  return simdgroups * rows * kGemvColumns * 4;
}
static_assert(gemv_threadgroup_bytes(kGemvMaxRows, kGemvMaxSimdgroups) <= 32768, "Metal's limit");

// gemm_double_buffered, gemm_single_stage: one output tile per threadgroup.
enum {
  kTileM = 64,
  kTileN = 64,
  kTileK = 32,
  kTileThreads = 256,
  kTileTableBytes = 80,  // the table of lut4 and a zero after it, rounded up to 16 bytes
  kTileGroups = 2,       // groups that a k-step can touch: groups of 16 are the shortest
  // Terms summed before the sum is scaled and added to the total: about the square root of the longest K of the error
  // bound, which keeps both chains short.
  kChainLength = 128,
};

constexpr uint32_t tile_stage_bytes(uint32_t activation_bytes) {
  return kTileM * kTileK * activation_bytes  // activations
         + kTileK * kTileN * 2               // codes, half
         + 2 * kTileGroups * kTileN * 4;     // scales and zero points, float
}

constexpr uint32_t tile_threadgroup_bytes(ElementType activations, uint32_t stages) {
  return stages * tile_stage_bytes(element_bytes(activations)) + kTileTableBytes;
}
static_assert(tile_threadgroup_bytes(ElementType::float16, 2) <= 20 * 1024, "two threadgroups a core and more");
static_assert(tile_threadgroup_bytes(ElementType::float32, 2) <= 28 * 1024, "two threadgroups a core");

}  // namespace marlin
