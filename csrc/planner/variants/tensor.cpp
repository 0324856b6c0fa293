// Tilings and plans of tensor. A threadgroup computes 32 or 64 rows of 64 or 128 columns, and its simdgroups lie side
// by side over them. K is split over threadgroups if there are too few of them.
#include "csrc/planner/variants/split_k.h"

namespace marlin {

namespace {

// The shortest slice of K. Adding up shorter slices would cost more than splitting K gains.
constexpr uint32_t kMinSlice = 256;

}  // namespace

Tiling tensor_split(const GemmTile& row, const WeightProblem& weight, uint32_t slices) {
  Tiling tiling{row};
  tiling.simdgroups = tensor_threads(row.tile) / kSimdWidth;
  tiling.k_per_slice = slice_length(weight, slices, kTensorK);
  tiling.splits = ceil_divide(weight.K, tiling.k_per_slice);
  return tiling;
}

std::optional<Tiling> tensor_tiling(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  if (row.tile.M > round_up(problem.M, uint32_t{kTensorRows})) return std::nullopt;
  return cheapest_split(problem, device, 1, max_slices(problem.weight, kMinSlice),
                        [&](uint32_t slices) { return tensor_split(row, problem.weight, slices); });
}

Plan build_tensor(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t N = problem.weight.N;
  const RowBlocks blocks = row_blocks(tiling, problem.M, 0);
  Dispatch dispatch =
      product_dispatch(tiling, problem, blocks, {ceil_divide(N, tiling.tile.N), blocks.count, tiling.splits});
  set_direct_constants(dispatch.constants, tiling, problem.weight, blocks.rows, device);
  Plan plan{.dispatches = {std::move(dispatch)}};
  add_reduction(plan, tiling, problem);
  return plan;
}

}  // namespace marlin
