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

namespace {

bool has_kernel(const GemmProblem& problem, const GpuDevice& device) {
  return device.tensor_units && has_tensor_kernel(problem.weight.format, problem.activations);
}

std::optional<Tiling> tensor_tiling(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  if (!has_kernel(problem, device) || row.tile.M > round_up(problem.M, uint32_t{kTensorRows})) return std::nullopt;
  return best_split(problem, device, 1, max_slices(problem.weight, kMinSlice),
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

Tiling tensor_candidate(GemmTile row, const MoeProblem& problem) {
  row.kernel = Kernel::moe_tensor;
  return tensor_split(row, problem.product.weight, 1);
}

std::string refusal(const GemmProblem& problem, const GpuDevice& device) {
  if (!device.tensor_units) return "one that this GPU can run (" + tensor_refusal(device.system) + ")";
  if (has_kernel(problem, device)) return "";
  return "one that multiplies " + std::string(name(problem.activations)) + " activations by " +
         std::string(name(problem.weight.format)) +
         " weights (tensor units multiply float16 and bfloat16 activations by weights without a lut)";
}

#define MARLIN_TENSOR_TILE(M, N, K) GemmTile{GemmVariant::tensor, Kernel::gemm_tensor, {M, N, K}, 0},
constexpr std::array kTiles{MARLIN_TENSOR_TILES(MARLIN_TENSOR_TILE)};
#undef MARLIN_TENSOR_TILE

}  // namespace

constinit const VariantRules tensor_variant{
    .tiles = kTiles,
    .tiling = tensor_tiling,
    .build = build_tensor,
    .threadgroup_bytes = [](const Tiling&, const GemmProblem&, uint32_t) { return 0U; },
    .add_expert_tilings = [](std::vector<Tiling>& tilings, const GemmTile& row, const MoeProblem& problem,
                             const GpuDevice&) { tilings.push_back(tensor_candidate(row, problem)); },
    .refusal = refusal,
    .simdgroup_columns = kTensorColumns,
    .has_tensor_products = true,
};

}  // namespace marlin
