// Tilings and plans of gemv. A threadgroup computes 128 columns. K is split over simdgroups first, and over
// threadgroups if those are not enough.
#include "csrc/planner/variants/split_k.h"

namespace marlin {

namespace {

// With more rows, the cost model finds fused at least as cheap, so gemv is planned only if the caller names it.
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

// Row blocks of all sizes are candidates. More and smaller blocks use more cores if the columns are few, and a block
// with more rows than the problem may keep more simdgroups resident.
std::optional<Tiling> gemv_tiling(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  if (problem.M > kMaxRows && problem.variant.is_auto()) return std::nullopt;
  return cheapest_split(problem, device, 1, max_slices(problem.weight, kGemvMinSlice),
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

}  // namespace marlin
