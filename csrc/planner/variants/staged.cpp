// Tilings and plans of double_buffered and single_stage: a grid of output tiles. K is split if there are fewer tiles
// than threadgroups that the GPU holds at once.
#include "csrc/core/math.h"
#include "csrc/planner/variants/split_k.h"

namespace marlin {

namespace {

// The shortest slice of K. The reduction of shorter slices would cost more than splitting K gains.
constexpr uint32_t kMinSlice = 256;

std::optional<Tiling> staged_tiling(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  const uint64_t resident = resident_threadgroups(row, problem, device);
  const uint64_t tiles = uint64_t{ceil_divide(weight.N, row.tile.N)} * ceil_divide(problem.M, row.tile.M);
  const uint64_t wanted = ceil_divide(resident, tiles);
  const auto slices = static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, max_slices(weight, kMinSlice)));
  Tiling tiling{row};
  tiling.simdgroups = tile_threads(row.tile) / kSimdWidth;
  tiling.k_per_slice = slice_length(weight, slices, row.tile.K);
  tiling.splits = ceil_divide(weight.K, tiling.k_per_slice);
  return tiling;
}

Plan build_staged(const Tiling& tiling, const GemmProblem& problem, const GpuDevice&) {
  const RowBlocks blocks = row_blocks(tiling, problem.M, 0);
  const Extent grid{ceil_divide(problem.weight.N, tiling.tile.N), blocks.count, tiling.splits};
  Plan plan{.dispatches = {product_dispatch(tiling, problem, blocks, grid)}};
  add_reduction(plan, tiling, problem);
  return plan;
}

uint32_t staged_bytes(const Tiling& tiling, const GemmProblem& problem, uint32_t) {
  return tile_threadgroup_bytes(tiling.tile, problem.activations, tiling.stages);
}

#define MARLIN_STAGED_TILE(M, N, K, variant, stages) \
  GemmTile{GemmVariant::variant, Kernel::gemm_##variant##_##M##x##N##x##K, {M, N, K}, stages},
constexpr std::array kDoubleBufferedTiles{MARLIN_TILES(MARLIN_STAGED_TILE, double_buffered, 2)};
constexpr std::array kSingleStageTiles{MARLIN_TILES(MARLIN_STAGED_TILE, single_stage, 1)};
#undef MARLIN_STAGED_TILE

}  // namespace

constinit const VariantRules double_buffered_variant{
    .tiles = kDoubleBufferedTiles, .tiling = staged_tiling, .build = build_staged, .threadgroup_bytes = staged_bytes};
constinit const VariantRules single_stage_variant{
    .tiles = kSingleStageTiles, .tiling = staged_tiling, .build = build_staged, .threadgroup_bytes = staged_bytes};

}  // namespace marlin
