// Tilings and plans of fused. A threadgroup computes 8 to 32 rows of 32 columns. K is split over simdgroups first, and
// over threadgroups if those are not enough. If the last rows do not fill a block, they are padded, or a second
// dispatch computes them in the smallest block that holds them.
#include "csrc/planner/variants/split_k.h"

namespace marlin {

Tiling fused_split(const GemmTile& row, const WeightProblem& weight, uint32_t rest_rows, uint32_t slices) {
  uint32_t max_simdgroups = kFusedMaxSimdgroups;
  while (fused_threadgroup_bytes(weight.format, row.tile.M, max_simdgroups) > kPreferredThreadgroupBytes)
    --max_simdgroups;
  Tiling tiling{row};
  tiling.rest_rows = rest_rows;
  tiling.k_per_slice = round_up(ceil_divide(weight.K, slices), kFusedK);
  const uint32_t filled = ceil_divide(weight.K, tiling.k_per_slice);
  tiling.splits = ceil_divide(filled, max_simdgroups);
  tiling.simdgroups = ceil_divide(filled, tiling.splits);
  return tiling;
}

namespace {

std::optional<Tiling> fused_tiling(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t rows = row.tile.M;
  const uint32_t rounded_M = round_up(problem.M, 8);
  if (rows > rounded_M) return std::nullopt;
  const uint32_t most = max_slices(problem.weight, kFusedMinSlice);
  const auto best = [&](uint32_t rest_rows) {
    return best_split(problem, device, std::min(kFusedMinSlices, most), most,
                      [&](uint32_t slices) { return fused_split(row, problem.weight, rest_rows, slices); });
  };
  const Tiling padded = best(0);
  if (rounded_M % rows == 0) return padded;
  const Tiling with_rest = best(round_up(problem.M % rows, 8));
  const bool rest_wins = estimate(with_rest, problem, device).total() < estimate(padded, problem, device).total();
  return rest_wins ? with_rest : padded;
}

Plan build_fused(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t N = problem.weight.N;
  Plan plan;
  for (uint32_t launch = 0; launch < launches(tiling); ++launch) {
    const RowBlocks blocks = row_blocks(tiling, problem.M, launch);
    Dispatch dispatch =
        product_dispatch(tiling, problem, blocks, {ceil_divide(N, kFusedColumns), blocks.count, tiling.splits});
    set_direct_constants(dispatch.constants, tiling, problem.weight, blocks.rows, device);
    plan.dispatches.push_back(std::move(dispatch));
  }
  add_reduction(plan, tiling, problem);
  return plan;
}

Tiling fused_candidate(GemmTile row, const MoeProblem& problem, const GpuDevice& device) {
  row.kernel = Kernel::moe_fused;
  const WeightProblem& weight = problem.product.weight;
  uint32_t most = std::clamp<uint32_t>(weight.K / kFusedMinSlice, 1, kFusedMaxSimdgroups);
  while (fused_threadgroup_bytes(weight.format, row.tile.M, most) > kPreferredThreadgroupBytes)
    --most;
  return best_split(problem, device, std::min(most, kFusedMinSlices), most,
                    [&](uint32_t slices) { return fused_split(row, weight, 0, slices); });
}

constexpr GemmTile fused_tile(uint32_t rows) {
  return {GemmVariant::fused, Kernel::gemm_fused, {rows, kFusedColumns, kFusedK}, 0};
}

constexpr std::array kTiles{fused_tile(32), fused_tile(24), fused_tile(16), fused_tile(8)};
static_assert(kTiles.front().tile.M == kFusedMaxRows, "every number of rows that the kernel has");

}  // namespace

constinit const VariantRules fused_variant{
    .tiles = kTiles,
    .tiling = fused_tiling,
    .build = build_fused,
    .threadgroup_bytes =
        [](const Tiling& tiling, const GemmProblem& problem, uint32_t rows) {
          return fused_threadgroup_bytes(problem.weight.format, rows, tiling.simdgroups);
        },
    .add_expert_tilings = [](std::vector<Tiling>& tilings, const GemmTile& row, const MoeProblem& problem,
                             const GpuDevice& device) { tilings.push_back(fused_candidate(row, problem, device)); },
    .has_32_bit_offsets = true,
    .simdgroup_columns = kFusedColumns,
    .row_unit = kBlock,
    .most_simdgroups = kFusedMaxSimdgroups,
};

}  // namespace marlin
