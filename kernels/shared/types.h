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
  kSlotPartials = 9,  // float [slices, M, N]; of stripes: [2 * stripes, tile M, tile N]
  kSlotParams = 10,
  // The mLSTM kernels number theirs in mlstm_params.h, up to the same count.
  kSlotCount = 20,
};

// Function constants: X(index, Metal type, name in shaders, name here). Every pipeline is given all of them; a kernel
// ignores those that it does not read. The types are ElementTypes.
//   vector_columns          N is a multiple of 4; the first packed word, scale and zero point are aligned to 4 elements
//   vector_activations      no perm; the first activation is aligned to 4 elements, the row stride a multiple of 4
//   rows_per_threadgroup    activation rows of a threadgroup: gemv 1 to kGemvMaxRows, fused 8 to kFusedMaxRows by 8
//   subnormal_codes         codes are read as half subnormals: where probe_half_subnormals says that they live
//   writes_partials         the K slices of the grid go to kSlotPartials and wait for reduce
//   short_group_size        fused: the group size where it is 16 or 32 and shorter than K, else 0
//   ragged_k                K is no multiple of the step of gemv or fused, kGemvK or kFusedK
//   ragged_n                N is no multiple of their strip, kGemvColumns or kFusedColumns
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
  X(11, bool, writes_partials, WritesPartials)              \
  X(12, int, short_group_size, ShortGroupSize)              \
  X(13, bool, ragged_k, RaggedK)                            \
  X(14, bool, ragged_n, RaggedN)

enum FunctionConstant {
#define MARLIN_CONSTANT_INDEX(index, type, shader_name, name) kConstant##name = index,
  MARLIN_FUNCTION_CONSTANTS(MARLIN_CONSTANT_INDEX)
#undef MARLIN_CONSTANT_INDEX
      kFunctionConstantCount = 15,
};

// gemv and gemm. A slice is the part of K of one simdgroup (gemv, fused) or of one threadgroup (the staged gemm).
struct GemmParams {
  int64_t a_row_stride;  // elements
  uint32_t M;
  uint32_t N;
  uint32_t K;
  uint32_t group_size;  // a multiple of 8; at most K
  uint32_t k_per_slice;
  uint32_t m_begin;  // fused: row of the first row block
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

// The same for tiles that several stripes share. Stripe s has its share of its first tile in partials[2 * s], of a
// later one that it does not finish in partials[2 * s + 1].
struct StripedReduceParams {
  uint32_t M;
  uint32_t N;
  uint32_t tile_M;
  uint32_t tile_N;
  uint32_t slices;  // of a tile
  uint32_t stripes;
};
static_assert(sizeof(StripedReduceParams) == 24, "shared with the shaders");

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
  kGemvK = 16,
  kGemvMaxRows = 8,
  kGemvOddApartRows = 4,  // up to which odd k have sums of their own
  kGemvMaxSimdgroups = 16,
};

constexpr uint32_t gemv_threadgroup_bytes(WeightFormat format, uint32_t rows, uint32_t simdgroups) {
  return simdgroups * rows * kGemvColumns * 4 + (format == WeightFormat::lut4 ? kLutSize * 4 : 0);
}

// gemm_fused: a simdgroup owns 32 columns of up to 32 rows and takes 64 k at a step; its threadgroup splits a range of
// K between its simdgroups.
enum {
  kFusedColumns = 32,
  kFusedMaxRows = 32,
  kFusedK = 64,
  kFusedMaxSimdgroups = 8,
  // Terms summed in the matrix unit's own accumulators before they join the total: a power of two that makes both
  // chains short for the longest K of the error bound.
  kFusedChainLength = 256,
};

constexpr uint32_t fused_threadgroup_bytes(WeightFormat format, uint32_t rows, uint32_t simdgroups) {
  return simdgroups * rows * kFusedColumns * 4 + (format == WeightFormat::lut4 ? kLutSize * 4 : 0);
}
static_assert(fused_threadgroup_bytes(WeightFormat::uint4b8, kFusedMaxRows, kFusedMaxSimdgroups) <= 32768,
              "Metal's limit");

// gemm_double_buffered, gemm_single_stage, gemm_striped: M x N outputs of a threadgroup, K k at a step.
struct TileShape {
  uint32_t M;
  uint32_t N;
  uint32_t K;
};

enum {
  kTileTableBytes = 80,        // the table of lut4 and a zero after it, rounded up to 16 bytes
  kShortestGroup = 16,         // of groups that end before K does
  kSimdgroupRows = 32,         // outputs of a simdgroup: these rows, and 16 or 32 columns
  kMostOutputsOf16 = 64 * 64,  // of a tile whose simdgroups have 16 columns
  // Terms summed before the sum is scaled and added to the total: about the square root of the longest K of the error
  // bound, which keeps both chains short.
  kChainLength = 128,
};

// More columns load fewer operands for a product, in twice the accumulators.
constexpr uint32_t tile_simdgroup_columns(TileShape tile) {
  return tile.M * tile.N > kMostOutputsOf16 ? 32 : 16;
}

constexpr uint32_t tile_threads(TileShape tile) {
  return tile.M * tile.N / (kSimdgroupRows * tile_simdgroup_columns(tile)) * kSimdWidth;
}

// Groups that a step can touch.
constexpr uint32_t tile_groups(TileShape tile) {
  return ceil_divide(tile.K, kShortestGroup);
}

constexpr uint32_t tile_code_bytes(TileShape tile) {
  return tile.K * tile.N * 2;  // half
}

constexpr uint32_t tile_scale_bytes(TileShape tile) {
  return 2 * tile_groups(tile) * tile.N * 4;  // scales and zero points, float
}

constexpr uint32_t tile_stage_bytes(TileShape tile, uint32_t activation_bytes) {
  return tile.M * tile.K * activation_bytes + tile_code_bytes(tile) + tile_scale_bytes(tile);
}

constexpr uint32_t tile_threadgroup_bytes(TileShape tile, ElementType activations, uint32_t stages) {
  return stages * tile_stage_bytes(tile, element_bytes(activations)) + kTileTableBytes;
}
static_assert(tile_threadgroup_bytes({64, 64, 32}, ElementType::float16, 2) <= 20 * 1024, "three threadgroups a core");
static_assert(tile_threadgroup_bytes({64, 64, 32}, ElementType::float32, 2) <= 28 * 1024, "two threadgroups a core");

// gemm_striped: K of a tile is cut into slices of k_per_slice, of which the last takes the remainder too. The slices of
// the first tile, then those of the tile below it, and column by column of tiles so on, are one line of units; stripe s
// of S takes the units from stripe_begin(s) to stripe_begin(s + 1). Stripes differ by at most a unit; with fewer units
// than stripes the last ones are idle.
constexpr uint32_t stripe_slices(uint32_t K, uint32_t k_per_slice) {
  return K / k_per_slice > 1 ? K / k_per_slice : 1;
}

constexpr uint32_t stripe_begin(uint32_t units, uint32_t stripes, uint32_t stripe) {
  return stripe * (units / stripes) + (stripe < units % stripes ? stripe : units % stripes);
}

}  // namespace marlin
