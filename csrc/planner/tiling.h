// A Tiling describes one way to compute a product. The planner ranks these small values and builds a Plan only for the
// best one.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "csrc/core/gemm_variants.h"
#include "csrc/planner/device.h"
#include "csrc/planner/problem.h"

namespace marlin {

struct Extent {
  uint32_t x = 1, y = 1, z = 1;
};

// A tile of a variant, with the division of K and of the rows for one problem.
struct Tiling : GemmTile {
  uint32_t simdgroups = 0;  // per threadgroup
  // the length of K that one simdgroup (gemv, fused), one threadgroup (staged, tensor) or one unit of work (striped)
  // sums
  uint32_t k_per_slice = 0;
  uint32_t splits = 1;  // the number of threadgroups that share a tile's K; each writes partial sums if there are
                        // several
  // in fused, the number of rows in a smaller block that computes the last M % tile.M rows; 0 if the last block is
  // padded instead
  uint32_t rest_rows = 0;
  uint32_t stripes = 0;              // in striped, the number of threadgroups
  bool stripes_share_tiles = false;  // in striped, true if stripes share the K of a tile and write partial sums
  bool automatic = false;            // true if "auto" may take it without a measurement
  double seconds = 0;                // estimated time of all dispatches
};
static_assert(std::is_trivially_copyable_v<Tiling> && sizeof(Tiling) <= 64, "ranking copies tilings freely");

// A number of equal row blocks, which one launch of the product kernel computes.
struct RowBlocks {
  uint32_t m_begin, rows, count;
};

constexpr uint32_t launches(const Tiling& tiling) {
  return tiling.rest_rows == 0 ? 1 : 2;
}

constexpr RowBlocks row_blocks(const Tiling& tiling, uint32_t M, uint32_t launch) {
  const uint32_t rows = tiling.tile.M;
  if (tiling.rest_rows == 0) return {0, rows, ceil_divide(M, rows)};
  return launch == 0 ? RowBlocks{0, rows, M / rows} : RowBlocks{M - M % rows, tiling.rest_rows, 1};
}

constexpr uint64_t tile_count(const TileShape& tile, const GemmProblem& problem) {
  return uint64_t{ceil_divide(problem.M, tile.M)} * ceil_divide(problem.weight.N, tile.N);
}

// Returns the bytes of threadgroup memory for a threadgroup that computes `rows` rows.
uint32_t threadgroup_bytes(const Tiling& tiling, const GemmProblem& problem, uint32_t rows);

constexpr bool writes_partials(const Tiling& tiling) {
  return tiling.splits > 1 || tiling.stripes_share_tiles;
}

// Returns the shape [z, y, x] of the partial sums in floats, or all zeros if the tiling writes none.
constexpr Extent partials(const Tiling& tiling, const GemmProblem& problem) {
  if (!writes_partials(tiling)) return {0, 0, 0};
  if (tiling.stripes_share_tiles) return {tiling.tile.N, tiling.tile.M, 2 * tiling.stripes};
  return {problem.weight.N, problem.M, tiling.splits};
}

constexpr Extent elementwise_grid(uint32_t columns, uint32_t rows) {
  return {ceil_divide(columns, kElementwiseWidth), ceil_divide(rows, kElementwiseHeight), 1};
}

// Returns the grid of the kernel that adds up the partial sums.
constexpr Extent reduction_grid(const Tiling& tiling, const GemmProblem& problem) {
  if (!tiling.stripes_share_tiles) return elementwise_grid(problem.weight.N, problem.M);
  const Extent tile = elementwise_grid(tiling.tile.N, tiling.tile.M);
  return {tile.x, tile.y, tiling.stripes - 1};
}

// Returns a tiling for each tile that problem.variant allows and that can compute the problem. Each tiling splits K in
// the way with the least estimated time. Throws std::invalid_argument if the problem is empty or the variant cannot
// compute it.
std::vector<Tiling> gemm_tilings(const GemmProblem& problem, const GpuDevice& device);

// Returns the tiling that a tuner measured as the fastest. Without a measurement, returns the tiling with the least
// estimated time: among the tilings that "auto" may use, or among all tilings if there is no such tiling.
const Tiling& choose(const std::vector<Tiling>& tilings, const GemmProblem& problem);

// Returns the text that explains why choose() returned this tiling.
std::string reason(const Tiling& chosen, const GemmProblem& problem, const GpuDevice& device);

// Returns true if moe_sort must first group the pairs into row blocks.
constexpr bool sorts_pairs(const GemmTile& tile) {
  return declares(tile.kernel, kSlotBlocks);
}

// Returns true if the product kernel also multiplies by the row weights and adds up the products of each token.
constexpr bool adds_up_tokens(const GemmTile& tile) {
  return declares(tile.kernel, kSlotRowWeights);
}

// Returns true if a second kernel, moe_reduce, multiplies the pairs' fp32 products by row weights, or adds them up for
// each token.
constexpr bool combines(const Tiling& tiling, const MoeProblem& problem) {
  return (problem.reduce || problem.has_row_weights) && !adds_up_tokens(tiling);
}

}  // namespace marlin
