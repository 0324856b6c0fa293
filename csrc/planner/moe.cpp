// Plans of products with experts. With few rows, each threadgroup computes one row with the body of gemv. With many
// rows, it computes a block of an expert's rows with the body of fused or tensor. K is split over simdgroups only, and
// in tensor not at all, so that one dispatch computes the products.
#include "csrc/planner/variants/split_k.h"

namespace marlin {

namespace {

constexpr uint32_t kMinGemvSlice = 64;
constexpr uint32_t kMinFusedSlice = 2 * kFusedK;
constexpr uint32_t kSimdgroupColumns = kFusedColumns;
static_assert(kSimdgroupColumns == kTensorColumns, "fused and tensor have simdgroups of equal width");

struct Candidate {
  Tiling tiling;
  double seconds;
};

// Returns one dense product that costs as much as the products of all experts. Its weight has the columns of `weights`
// experts side by side, and its M is the number of rows of each expert.
GemmProblem dense_problem(const MoeProblem& problem, uint32_t rows, uint32_t weights) {
  GemmProblem dense = problem.product;
  dense.M = rows;
  const uint64_t groups = ceil_divide(dense.weight.K, group_size(dense.weight));
  const uint64_t most = std::max<uint64_t>(UINT32_MAX / groups / dense.weight.N, 1);
  dense.weight.N *= static_cast<uint32_t>(std::min<uint64_t>(weights, most));
  return dense;
}

Candidate gemv_candidate(const GemmTile& row, const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem dense = dense_problem(problem, 1, problem.product.M);
  const uint32_t most = std::clamp<uint32_t>(dense.weight.K / kMinGemvSlice, 1, kGemvMaxSimdgroups);
  const Tiling tiling =
      cheapest_split(dense, device, 1, most, [&](uint32_t slices) { return gemv_split(row, dense.weight, slices); });
  return {tiling, cost(tiling, dense, device).seconds};
}

Candidate fused_candidate(const GemmTile& row, const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem dense = dense_problem(problem, rows_of_expert(problem), busy_experts(problem));
  uint32_t most = std::clamp<uint32_t>(dense.weight.K / kMinFusedSlice, 1, kFusedMaxSimdgroups);
  while (fused_threadgroup_bytes(dense.weight.format, row.tile.M, most) > kPreferredThreadgroupBytes)
    --most;
  const Tiling tiling = cheapest_split(dense, device, std::min(most, 4U), most,
                                       [&](uint32_t slices) { return fused_split(row, dense.weight, 0, slices); });
  return {tiling, cost(tiling, dense, device).seconds + kDispatchSeconds};  // moe_sort
}

Candidate tensor_candidate(const GemmTile& row, const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem dense = dense_problem(problem, rows_of_expert(problem), busy_experts(problem));
  const Tiling tiling = tensor_split(row, dense.weight, 1);
  return {tiling, cost(tiling, dense, device).seconds + kDispatchSeconds};  // moe_sort
}

// Returns the variant that the plan must have, or "auto". A tuner's table counts only where it names the variant for
// tensor units: the table holds times of dense products, and no time of these units is known on any GPU.
std::string_view wanted_variant(const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  const bool measured = device.tensor_units && names_variant(product.tuned, GemmVariant::tensor);
  return product.variant == "auto" && measured ? name(GemmVariant::tensor) : product.variant;
}

Candidate choose(const MoeProblem& problem, const GpuDevice& device) {
  check_variant("moe_gemm", problem.product.variant, device);
  std::vector<Candidate> candidates;
  const std::string_view variant = wanted_variant(problem, device);
  for (const GemmTile& row : kGemmTiles) {
    if (variant != "auto" && variant != name(row.variant)) continue;
    if (row.variant == GemmVariant::gemv && row.tile.M == 1) {
      candidates.push_back(gemv_candidate(row, problem, device));
    } else if (row.variant == GemmVariant::fused) {
      candidates.push_back(fused_candidate(row, problem, device));
    } else if (row.variant == GemmVariant::tensor && variant != "auto") {
      candidates.push_back(tensor_candidate(row, problem, device));
    }
  }
  if (candidates.empty()) {
    refuse("moe_gemm", "variant", "auto, gemv, fused or tensor on mps", "'" + std::string(variant) + "'");
  }
  return *std::ranges::min_element(candidates, {}, &Candidate::seconds);
}

MoeParams params_of(const Tiling& tiling, const MoeProblem& problem) {
  const WeightProblem& weight = problem.product.weight;
  const uint32_t rows = tiling.tile.M;
  return {.product = {problem.product.a_row_stride, problem.product.M, weight.N, weight.K, group_size(weight),
                      tiling.k_per_slice, 0},
          .a_slot_stride = problem.a_slot_stride,
          .experts = problem.experts,
          .top_k = problem.top_k,
          .id_bytes = problem.wide_ids ? 8U : 4U,
          .global_scale_expert_stride = weight.global_scale_per_column ? weight.N : 1,
          .block_rows = rows,
          .blocks = moe_blocks(problem.product.M, problem.experts, rows)};
}

Kernel kernel_of(GemmVariant variant) {
  if (variant == GemmVariant::gemv) return Kernel::moe_gemv;
  return variant == GemmVariant::tensor ? Kernel::moe_tensor : Kernel::moe_fused;
}

Dispatch moe_dispatch(const Tiling& tiling, const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  const bool few = tiling.variant == GemmVariant::gemv;
  const MoeParams params = params_of(tiling, problem);
  const uint32_t N = product.weight.N;
  const uint32_t group = group_size(product.weight);
  const Extent grid = few ? Extent{product.M, ceil_divide(N, kGemvColumns), 1}
                          : Extent{ceil_divide(N, tiling.tile.N), params.blocks, 1};
  Dispatch dispatch = product_dispatch(tiling, product, row_blocks(tiling, tiling.tile.M, 0), grid);
  dispatch.kernel = kernel_of(tiling.variant);
  dispatch.function = host_name(dispatch.kernel, product.weight.format, product.activations);
  dispatch.params = params;
  FunctionConstants& constants = dispatch.constants;
  constants[kConstantWritesPartials] = combines(problem);
  if (combines(problem)) constants[kConstantHasBias] = constants[kConstantBiasType] = 0;  // moe_reduce adds it
  if (problem.a_slot_stride % 4 != 0) constants[kConstantVectorActivations] = 0;
  constants[kConstantRows] = static_cast<int32_t>(tiling.tile.M);
  constants[kConstantSubnormalCodes] = device.half_subnormals;
  constants[kConstantRaggedK] = product.weight.K % tiling.tile.K != 0;
  constants[kConstantRaggedN] = N % (few ? uint32_t{kGemvColumns} : kSimdgroupColumns) != 0;
  if (!few && group < tiling.tile.K && group < product.weight.K) {
    constants[kConstantShortGroupSize] = static_cast<int32_t>(group);
  }
  return dispatch;
}

Dispatch reduce_dispatch(const MoeProblem& problem) {
  const GemmProblem& product = problem.product;
  const uint32_t terms = problem.reduce ? problem.top_k : 1;
  const uint32_t rows = product.M / terms;
  const int32_t weights_type = problem.has_row_weights ? static_cast<int32_t>(problem.row_weights) : -1;
  return {.kernel = Kernel::moe_reduce,
          .function = host_name(Kernel::moe_reduce, product.weight.format, product.activations),
          .constants = bias_constants(product),
          .grid = elementwise_grid(product.weight.N, rows),
          .threads = kElementwiseThreads,
          .params = MoeReduceParams{rows, product.weight.N, terms, problem.experts, problem.wide_ids ? 8U : 4U,
                                    weights_type}};
}

}  // namespace

bool combines(const MoeProblem& problem) {
  return problem.reduce || problem.has_row_weights;
}

Plan plan_moe(const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  check_weight("moe_gemm", product.weight);
  if (product.M == 0) refuse("moe_gemm", "expert_ids", "at least 1", "0");
  const Candidate chosen = choose(problem, device);
  Plan plan;
  plan.seconds = chosen.seconds;
  Dispatch products = moe_dispatch(chosen.tiling, problem, device);
  if (chosen.tiling.variant != GemmVariant::gemv) {
    const MoeParams params = params_of(chosen.tiling, problem);
    plan.block_words = params.blocks * kMoeBlockWords + product.M;
    plan.dispatches.push_back({.kernel = Kernel::moe_sort,
                               .function = std::string(info(Kernel::moe_sort).name),
                               .grid = {1, 1, 1},
                               .threads = {kMoeSortThreads, 1, 1},
                               .params = params});
  }
  plan.dispatches.push_back(std::move(products));
  if (combines(problem)) {
    plan.partials = {product.weight.N, product.M, 1};
    plan.dispatches.push_back(reduce_dispatch(problem));
  }
  return plan;
}

}  // namespace marlin
