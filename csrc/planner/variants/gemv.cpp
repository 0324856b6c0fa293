// Tilings and plans of gemv. A threadgroup computes 128 columns. K is split over simdgroups first, and over
// threadgroups if those are not enough.
#include "csrc/planner/variants/split_k.h"

namespace marlin {

namespace {

// With more rows, the model of lab/ finds fused at least as fast, so gemv is planned only if the caller names it.
constexpr uint32_t kMaxRows = 24;

}  // namespace

Tiling gemv_split(const GemmTile& row, const WeightProblem& weight, uint32_t slices) {
  Tiling tiling{row};
  tiling.k_per_slice = slice_length(weight, slices, kGemvK);
  const uint32_t filled = ceil_divide(weight.K, tiling.k_per_slice);
  uint32_t simdgroups = std::min<uint32_t>(filled, kGemvMaxSimdgroups);
  while (gemv_threadgroup_bytes(weight.format, row.tile.M, simdgroups) > kPreferredThreadgroupBytes)
    --simdgroups;
  tiling.splits = ceil_divide(filled, simdgroups);
  tiling.simdgroups = ceil_divide(filled, tiling.splits);
  return tiling;
}

namespace {

// Row blocks of all sizes are candidates. More and smaller blocks use more cores if the columns are few, and a block
// with more rows than the problem may keep more simdgroups resident.
std::optional<Tiling> gemv_tiling(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  if (problem.M > kMaxRows && problem.variant.is_auto()) return std::nullopt;
  return best_split(problem, device, 1, max_slices(problem.weight, kGemvMinSlice),
                    [&](uint32_t slices) { return gemv_split(row, problem.weight, slices); });
}

Plan build_gemv(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t N = problem.weight.N;
  const RowBlocks blocks = row_blocks(tiling, problem.M, 0);
  Dispatch dispatch =
      product_dispatch(tiling, problem, blocks, {blocks.count, ceil_divide(N, kGemvColumns), tiling.splits});
  set_direct_constants(dispatch.constants, tiling, problem.weight, blocks.rows, device);
  Plan plan{.dispatches = {std::move(dispatch)}};
  add_reduction(plan, tiling, problem);
  return plan;
}

Tiling gemv_candidate(GemmTile row, const MoeProblem& problem, const GpuDevice& device) {
  row.kernel = row.tile.M == 1 ? Kernel::moe_gemv : Kernel::moe_gemv_blocks;
  const WeightProblem& weight = problem.product.weight;
  uint32_t most = std::clamp<uint32_t>(weight.K / kGemvMinSlice, 1, kGemvMaxSimdgroups);
  while (gemv_threadgroup_bytes(weight.format, row.tile.M, most) > kPreferredThreadgroupBytes)
    --most;
  return best_split(problem, device, 1, most, [&](uint32_t slices) { return gemv_split(row, weight, slices); });
}

// Returns the tiling with which a threadgroup computes all slots of a token, and adds them.
Tiling gemv_reduce_candidate(GemmTile row, const MoeProblem& problem, const GpuDevice& device) {
  row.kernel = Kernel::moe_gemv_reduce;
  const WeightProblem& weight = problem.product.weight;
  const uint32_t room = std::min<uint32_t>(kMoeReduceMaxSimdgroups / problem.top_k, kGemvMaxSimdgroups);
  const uint32_t most = std::clamp<uint32_t>(weight.K / kGemvMinSlice, 1, room);
  return best_split(problem, device, 1, most, [&](uint32_t slices) {
    Tiling tiling = gemv_split(row, weight, slices);
    tiling.simdgroups *= problem.top_k;
    return tiling;
  });
}

void add_gemv_expert_tilings(std::vector<Tiling>& tilings, const GemmTile& row, const MoeProblem& problem,
                             const GpuDevice& device) {
  if (row.tile.M != 1 && row.tile.M != kMoeGemvRows) return;
  tilings.push_back(gemv_candidate(row, problem, device));
  if (row.tile.M == 1 && problem.reduce && problem.top_k <= kMoeReduceMaxSimdgroups) {
    tilings.push_back(gemv_reduce_candidate(row, problem, device));
  }
}

constexpr GemmTile gemv_tile(uint32_t rows) {
  return {GemmVariant::gemv, Kernel::gemv, {rows, kGemvColumns, kGemvK}, 0};
}

constexpr std::array kTiles{gemv_tile(1), gemv_tile(2), gemv_tile(3), gemv_tile(4),
                            gemv_tile(5), gemv_tile(6), gemv_tile(7), gemv_tile(8)};
static_assert(kTiles.size() == kGemvMaxRows, "every number of rows that the kernel has");

}  // namespace

constinit const VariantRules gemv_variant{
    .tiles = kTiles,
    .tiling = gemv_tiling,
    .build = build_gemv,
    .threadgroup_bytes =
        [](const Tiling& tiling, const GemmProblem& problem, uint32_t rows) {
          return gemv_threadgroup_bytes(problem.weight.format, rows, tiling.simdgroups);
        },
    .add_expert_tilings = add_gemv_expert_tilings,
    .has_rows_along_x = true,  // threadgroups that read the same weights start side by side
    .simdgroup_columns = kGemvColumns,
    .row_unit = 1,
    .most_simdgroups = kGemvMaxSimdgroups,
};

}  // namespace marlin
