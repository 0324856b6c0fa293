// Parameters of the GEMM kernels, and how much of a product a threadgroup and a simdgroup take. Shared by shaders and
// host. Plain C subset, see shared/types.h.
#pragma once

#include "kernels/shared/slots.h"

namespace marlin {

// Parameters of gemv and of all gemm kernels. A slice is the part of K that one simdgroup (gemv, fused) or one
// threadgroup (the staged kernels) takes.
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

// The same for tiles that several stripes share. Stripe s stores its share of its first tile in partials[2 * s], and
// its share of a later tile that it does not finish in partials[2 * s + 1].
struct StripedReduceParams {
  uint32_t M;
  uint32_t N;
  uint32_t tile_M;
  uint32_t tile_N;
  uint32_t slices;  // of a tile
  uint32_t stripes;
};
static_assert(sizeof(StripedReduceParams) == 24, "shared with the shaders");

struct RepackParams {
  uint32_t rows;     // of the kernel's grid, see variants.h
  uint32_t columns;  // of the kernel's grid
  int32_t stored_zeros;
  uint32_t unused;
};
static_assert(sizeof(RepackParams) == 16, "shared with the shaders");

// repack, dequantize and reduce: one thread per element of a (columns, rows) grid, in threadgroups of this shape.
enum { kElementwiseWidth = 64, kElementwiseHeight = 4 };

// gemv: a lane owns 4 columns, a simdgroup 128. The simdgroups of a threadgroup split a range of K between them.
enum {
  kGemvColumnsPerLane = 4,
  kGemvColumns = kSimdWidth * kGemvColumnsPerLane,
  kGemvK = 16,
  kGemvMaxRows = 8,
  kGemvMaxSeparateOddRows = 4,  // with more rows odd k share the accumulators of even k
  kGemvMaxSimdgroups = 16,
};

constexpr uint32_t gemv_threadgroup_bytes(WeightFormat format, uint32_t rows, uint32_t simdgroups) {
  return simdgroups * rows * kGemvColumns * 4 + (format == WeightFormat::lut4 ? kLutSize * 4 : 0);
}

// gemm_fused: a simdgroup owns 32 columns of up to 32 rows and takes 64 k per step. The simdgroups of a threadgroup
// split a range of K between them.
enum {
  kFusedColumns = 32,
  kFusedMaxRows = 32,
  kFusedK = 64,
  kFusedMaxSimdgroups = 8,
  // Terms that the matrix unit's accumulators sum before they are added to the total. A power of two that keeps both
  // chains short for K = 16384, the longest K of the error bound (docs/numerics.md).
  kFusedChainLength = 256,
};

constexpr uint32_t fused_threadgroup_bytes(WeightFormat format, uint32_t rows, uint32_t simdgroups) {
  return simdgroups * rows * kFusedColumns * 4 + (format == WeightFormat::lut4 ? kLutSize * 4 : 0);
}
static_assert(fused_threadgroup_bytes(WeightFormat::uint4b8, kFusedMaxRows, kFusedMaxSimdgroups) <= 32768,
              "Metal's limit");

// gemm_double_buffered, gemm_single_stage, gemm_striped: a threadgroup computes M x N outputs, K of k per step.
struct TileShape {
  uint32_t M;
  uint32_t N;
  uint32_t K;
};

enum {
  kTileTableBytes = 80,              // the table of lut4 and a zero after it, rounded up to 16 bytes
  kMinGroupSize = 16,                // of groups shorter than K
  kSimdgroupRows = 32,               // a simdgroup computes these rows of 16 or 32 columns
  kMaxOutputsOf16Columns = 64 * 64,  // the largest tile whose simdgroups have 16 columns
  // Terms summed before the sum is scaled and added to the total: about the square root of K = 16384, the longest K of
  // the error bound, which keeps both chains short.
  kChainLength = 128,
};

// Twice the columns need fewer operand loads per product, and twice the accumulators.
constexpr uint32_t tile_simdgroup_columns(TileShape tile) {
  return tile.M * tile.N > kMaxOutputsOf16Columns ? 32 : 16;
}

constexpr uint32_t tile_threads(TileShape tile) {
  return tile.M * tile.N / (kSimdgroupRows * tile_simdgroup_columns(tile)) * kSimdWidth;
}

// The number of groups that a step can touch.
constexpr uint32_t tile_groups(TileShape tile) {
  return ceil_divide(tile.K, kMinGroupSize);
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

// gemm_striped: the K of a tile is cut into slices of k_per_slice; the last slice also takes the remainder. All slices
// of all tiles form one line of units: the slices of the first tile, then those of the tile below it, column by column
// of tiles. Stripe s of S takes the units from stripe_begin(s) to stripe_begin(s + 1). Stripes differ by at most one
// unit. With fewer units than stripes the last stripes are idle.
constexpr uint32_t stripe_slices(uint32_t K, uint32_t k_per_slice) {
  return K / k_per_slice > 1 ? K / k_per_slice : 1;
}

constexpr uint32_t stripe_begin(uint32_t units, uint32_t stripes, uint32_t stripe) {
  return stripe * (units / stripes) + (stripe < units % stripes ? stripe : units % stripes);
}

}  // namespace marlin
