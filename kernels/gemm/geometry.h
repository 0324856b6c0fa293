// Parameters of the GEMM kernels, and the numbers of rows, columns and k per threadgroup and simdgroup. For shaders and
// host, in the C subset of kernels/shared/types.h.
#pragma once

#include "kernels/shared/slots.h"

namespace marlin {

// Parameters of gemv and of all gemm kernels. kernel_list.h defines slices and splits of K.
struct GemmParams {
  int64_t a_row_stride;  // elements
  uint32_t M;
  uint32_t N;
  uint32_t K;
  uint32_t group_size;  // a multiple of 8; at most K
  uint32_t k_per_slice;
  uint32_t m_begin;  // in fused, the first row that this dispatch computes
};
static_assert(sizeof(GemmParams) == 32, "shared with the shaders");

struct DequantizeParams {
  uint32_t N;
  uint32_t K;
  uint32_t group_size;
  uint32_t unused;
};
static_assert(sizeof(DequantizeParams) == 16, "shared with the shaders");

// out[row, :] = column ids[row] of the weight
struct EmbeddingParams {
  uint32_t N;
  uint32_t K;
  uint32_t group_size;
  uint32_t count;     // number of ids
  uint32_t id_bytes;  // 4 for int32 ids, 8 for int64
};
static_assert(sizeof(EmbeddingParams) == 20, "shared with the shaders");

// out[m, n] = round(sum over splits of partials[split, m, n] + bias[n])
struct ReduceParams {
  uint32_t M;
  uint32_t N;
  uint32_t splits;
  uint32_t unused;
};
static_assert(sizeof(ReduceParams) == 16, "shared with the shaders");

// The parameters of the kernel that adds up the tiles that several stripes share. Stripe s stores the partial sums of
// its first tile in partials[2 * s]. If the stripe ends inside another tile, it stores the partial sums of that last
// tile in partials[2 * s + 1].
struct StripedReduceParams {
  uint32_t M;
  uint32_t N;
  uint32_t tile_M;
  uint32_t tile_N;
  uint32_t slices;  // per tile
  uint32_t stripes;
};
static_assert(sizeof(StripedReduceParams) == 24, "shared with the shaders");

struct RepackParams {
  uint32_t rows;     // rows of the kernel's grid, see kernel_list.h
  uint32_t columns;  // columns of the kernel's grid
  int32_t stored_zeros;
  uint32_t code_bits;
};
static_assert(sizeof(RepackParams) == 16, "shared with the shaders");

// The threads per threadgroup of repack, dequantize, embedding and reduce. These kernels run one thread per element of
// a (columns, rows) grid.
enum { kElementwiseWidth = 64, kElementwiseHeight = 4 };

// gemv: each lane owns 4 columns, so a simdgroup owns 128 columns. The simdgroups of a threadgroup split a range of K
// between them.
enum {
  kGemvColumnsPerLane = 4,
  kGemvColumns = kSimdWidth * kGemvColumnsPerLane,
  kGemvK = 16,
  kGemvMaxRows = 8,
  kGemvMaxSeparateOddRows = 4,  // with more rows, odd k use the accumulators of even k
  kGemvMaxLoadsFirstRows = 4,   // with more rows, each row's activations are loaded just before their products
  kGemvMaxSimdgroups = 16,
};

// Returns true if a step loads all its operands before the first product. With a second plane, this is limited to three
// rows: with four rows and biases or scales of two levels, a thread would use 215 half-registers, and an M1 would
// spill.
constexpr bool gemv_loads_first(WeightFormat format, uint32_t rows) {
  return code_kind(format) != CodeKind::table && rows <= kGemvMaxLoadsFirstRows - (has_high_plane(format) ? 1U : 0U);
}

constexpr uint32_t gemv_threadgroup_bytes(WeightFormat format, uint32_t rows, uint32_t simdgroups) {
  return simdgroups * rows * kGemvColumns * 4 + (has_lut(format) ? kLutSize * 4 : 0);
}

enum { kBlock = 8 };  // the rows and columns of a simdgroup_matrix

// gemm_fused: a simdgroup computes up to 32 rows of 32 columns. A step has 64 k, in two loads of 32 k. Each load makes
// four fragments of 8 k. The simdgroups of a threadgroup split a range of K between them.
enum {
  kFusedColumns = 32,
  kFusedMaxRows = 32,
  kFusedK = 64,
  kFusedMaxSimdgroups = 8,
  // The matrix unit's accumulators sum this many terms and are then added to the totals. The error bound
  // (docs/use/operators.md) holds up to K = 16384. At this K, a total has 64 terms, and no sum has more than 256.
  kFusedChainLength = 256,
};

constexpr uint32_t fused_threadgroup_bytes(WeightFormat format, uint32_t rows, uint32_t simdgroups) {
  return simdgroups * rows * kFusedColumns * 4 + (has_lut(format) ? kLutSize * 4 : 0);
}
static_assert(kFusedMaxSimdgroups * kFusedMaxRows * kFusedColumns * 4 <= kMaxThreadgroupBytes,
              "Metal's limit, for formats without a table");

// The tiles of gemm_double_buffered, gemm_single_stage and gemm_striped: a threadgroup computes M x N outputs in steps
// of K along k.
struct TileShape {
  uint32_t M;
  uint32_t N;
  uint32_t K;
};

enum {
  kTileTableBytes = 80,              // bytes of a format's table with one zero after it, rounded up to a multiple of 16
  kMinGroupSize = 16,                // the smallest supported group size, unless K is smaller
  kSimdgroupRows = 32,               // a simdgroup computes 32 rows of 16 or 32 columns
  kMaxOutputsOf16Columns = 64 * 64,  // the largest tile (M * N) whose simdgroups have 16 columns
  // This many terms are summed before the sum is scaled and added to the total. The error bound (docs/use/operators.md)
  // holds up to K = 16384, whose square root is 128. So neither the sum nor the total has more than 128 terms.
  kChainLength = 128,
};

// Returns the number of columns that a simdgroup computes. 32 columns need fewer operand loads per product than 16
// columns, but twice as many accumulators.
constexpr uint32_t tile_simdgroup_columns(TileShape tile) {
  return tile.M * tile.N > kMaxOutputsOf16Columns ? 32 : 16;
}

constexpr uint32_t tile_threads(TileShape tile) {
  return tile.M * tile.N / (kSimdgroupRows * tile_simdgroup_columns(tile)) * kSimdWidth;
}

// Returns the largest number of groups in one step.
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
static_assert(tile_threadgroup_bytes({64, 64, 32}, ElementType::float16, 2) <= kPreferredThreadgroupBytes,
              "the threadgroup memory of an M1 core (60 KB) holds three; registers may allow fewer");
static_assert(tile_threadgroup_bytes({64, 64, 32}, ElementType::float32, 2) <= 28 * 1024,
              "the threadgroup memory of an M1 core (60 KB) holds two; registers may allow fewer");

// gemm_tensor: a simdgroup computes 32 rows of 32 columns in steps of 32 k. The simdgroups of a threadgroup form a grid
// over the tile: tile.M / 32 down and tile.N / 32 across.
enum {
  kTensorRows = 32,
  kTensorColumns = 32,
  kTensorK = 32,
  kTensorMaxSimdgroups = 8,
};

// The words that probe_tensor_layout stores: for the left operand, the right operand and the sums, first with half and
// then with bfloat operands.
//   kTensorMatches   all elements have the positions of tensor_place
//   kTensorElement   the first wrong element: bits 24 to 28 are its lane, 16 to 19 its index in the lane, 8 to 15 its
//                    row, and 0 to 7 its column
//   kTensorCapacity  the low 16 bits are the number of elements that a lane holds
enum {
  kTensorMatches = 1,
  kTensorElement = 1 << 30,
  kTensorCapacity = 1 << 29,
  kTensorProbed = 6,
};

// Returns true if gemm_tensor multiplies codes by their scales before the product. An E2M1 code and an E4M3 scale have
// so few significant bits that half and bfloat represent their product exactly. So their groups need no separate sums.
constexpr bool tensor_scales_codes(WeightFormat format) {
  return code_kind(format) == CodeKind::e2m1 && scale_coding(format) == ScaleCoding::e4m3;
}

constexpr uint32_t tensor_threads(TileShape tile) {
  return tile.M / kTensorRows * (tile.N / kTensorColumns) * kSimdWidth;
}

// gemm_striped divides the K of a tile into slices of k_per_slice; the last slice also contains the remainder. A unit
// is one slice of one tile. Units are numbered tile by tile, down each column of tiles, and slice by slice within a
// tile. Stripe s contains the units from stripe_begin(s) up to stripe_begin(s + 1). The lengths of two stripes differ
// by at most one unit. If there are fewer units than stripes, the last stripes are empty.
constexpr uint32_t stripe_slices(uint32_t K, uint32_t k_per_slice) {
  return K / k_per_slice > 1 ? K / k_per_slice : 1;
}

constexpr uint32_t stripe_begin(uint32_t units, uint32_t stripes, uint32_t stripe) {
  return stripe * (units / stripes) + (stripe < units % stripes ? stripe : units % stripes);
}

}  // namespace marlin
