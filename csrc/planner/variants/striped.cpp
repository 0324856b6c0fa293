// Tilings and plans of striped: as many threadgroups as the GPU holds at once, each with an equal stripe of the work
// (docs/inside/striping.md).
#include "csrc/core/math.h"
#include "csrc/planner/builder.h"

namespace marlin {

namespace {

// The length of a slice of K. It is a multiple of every tile's K and of every group size, so stripes end where groups
// end. Shorter slices would balance the stripes better, but they would need more partial sums, which cost more than the
// better balance saves.
constexpr uint32_t kSlice = 256;
// K is split if stripes of whole tiles would leave more than an eighth of the threadgroups' time idle.
constexpr uint32_t kIdleShare = 8;

bool whole_tiles_fill(uint64_t tiles, uint64_t stripes) {
  const uint64_t rounds = ceil_divide(tiles, stripes);
  return (rounds * stripes - tiles) * kIdleShare <= rounds * stripes;
}

bool some_stripe_starts_within_a_tile(uint32_t units, uint32_t stripes, uint32_t slices) {
  for (uint32_t stripe = 1; stripe < stripes; ++stripe) {
    if (stripe_begin(units, stripes, stripe) % slices != 0) return true;
  }
  return false;
}

std::optional<Tiling> striped_tiling(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t K = problem.weight.K;
  const uint64_t resident = resident_threadgroups(row, problem, device);
  const uint64_t tiles = uint64_t{ceil_divide(problem.M, row.tile.M)} * ceil_divide(problem.weight.N, row.tile.N);
  Tiling tiling{row};
  tiling.simdgroups = tile_threads(row.tile) / kSimdWidth;
  tiling.k_per_slice = whole_tiles_fill(tiles, resident) ? round_up(K, row.tile.K) : kSlice;
  const uint32_t slices = stripe_slices(K, tiling.k_per_slice);
  if (tiles * slices > UINT32_MAX) return std::nullopt;
  const auto units = static_cast<uint32_t>(tiles * slices);
  tiling.stripes = static_cast<uint32_t>(std::min<uint64_t>(resident, units));
  tiling.stripes_share_tiles = some_stripe_starts_within_a_tile(units, tiling.stripes, slices);
  return tiling;
}

Plan build_striped(const Tiling& tiling, const GemmProblem& problem, const GpuDevice&) {
  const RowBlocks blocks = row_blocks(tiling, problem.M, 0);
  Plan plan{.dispatches = {product_dispatch(tiling, problem, blocks, {tiling.stripes, 1, 1})},
            .partials = partials(tiling, problem)};
  if (!tiling.stripes_share_tiles) return plan;
  const TileShape& tile = tiling.tile;
  const uint32_t slices = stripe_slices(problem.weight.K, tiling.k_per_slice);
  plan.dispatches.push_back(
      {.instance = {.kernel = Kernel::reduce_striped, .element = problem.activations},
       .constants = bias_constants(problem),
       .grid = reduction_grid(tiling, problem),
       .threads = kElementwiseThreads,
       .params = StripedReduceParams{problem.M, problem.weight.N, tile.M, tile.N, slices, tiling.stripes}});
  return plan;
}

#define MARLIN_STRIPED_TILE(M, N, K, stages) \
  GemmTile{GemmVariant::striped, Kernel::gemm_striped_##M##x##N##x##K, {M, N, K}, stages},
constexpr std::array kTiles{MARLIN_STRIPED_TILES(MARLIN_STRIPED_TILE, 2)};
#undef MARLIN_STRIPED_TILE

}  // namespace

constinit const VariantRules striped_variant{
    .tiles = kTiles,
    .tiling = striped_tiling,
    .build = build_striped,
    .threadgroup_bytes =
        [](const Tiling& tiling, const GemmProblem& problem, uint32_t) {
          return tile_threadgroup_bytes(tiling.tile, problem.activations, tiling.stages);
        },
};

}  // namespace marlin
