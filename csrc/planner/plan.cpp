// Builds the plans of gemm, and the plans of kernels with one thread per element.
#include "csrc/planner/plan.h"

#include <numeric>
#include <stdexcept>

#include "csrc/planner/estimate.h"
#include "csrc/planner/variants.h"

namespace marlin {

namespace {

// Returns the function constants of a product kernel whose threadgroups compute `rows` rows each.
FunctionConstants product_constants(const Tiling& tiling, const GemmProblem& problem, uint32_t rows,
                                    const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  const uint32_t group = group_size(weight);
  FunctionConstants constants = weight_constants(weight);
  // If K is split, the reduce kernel adds the bias, otherwise the product kernel. striped always has splits == 1: its
  // product kernel adds the bias to a tile of a single stripe, and reduce_striped adds it to shared tiles.
  if (tiling.splits == 1) {
    const FunctionConstants bias = bias_constants(problem);
    for (FunctionConstant index : {kConstantHasBias, kConstantBiasType})
      constants[index] = bias[index];
  }
  constants[kConstantVectorActivations] = !weight.has_perm && problem.vector_aligned_a && problem.a_row_stride % 4 == 0;
  constants[kConstantWritesPartials] = writes_partials(tiling);
  if (tiling.stages != 0) return constants;
  const bool has_short_groups = group < tiling.tile.K && group < weight.K;
  constants[kConstantRows] = static_cast<int32_t>(rows);
  constants[kConstantSubnormalCodes] = device.half_subnormals;
  constants[kConstantShortGroupSize] = has_short_groups ? static_cast<int32_t>(group) : 0;
  constants[kConstantRaggedK] = weight.K % tiling.tile.K != 0;
  constants[kConstantRaggedN] = weight.N % rules_of(tiling.variant).simdgroup_columns != 0;
  return constants;
}

// Returns the dispatch of the kernel that adds up the partial sums.
Dispatch reduction(const Tiling& tiling, const GemmProblem& problem) {
  const uint32_t N = problem.weight.N;
  Dispatch dispatch{.instance = {.kernel = Kernel::reduce, .element = problem.activations},
                    .constants = bias_constants(problem),
                    .grid = reduction_grid(tiling, problem),
                    .threads = kElementwiseThreads,
                    .params = ReduceParams{problem.M, N, tiling.splits, 0}};
  if (!tiling.stripes_share_tiles) return dispatch;
  const uint32_t slices = stripe_slices(problem.weight.K, tiling.k_per_slice);
  dispatch.instance.kernel = Kernel::reduce_striped;
  dispatch.params = StripedReduceParams{problem.M, N, tiling.tile.M, tiling.tile.N, slices, tiling.stripes};
  return dispatch;
}

}  // namespace

void refuse(std::string_view op, std::string_view argument, std::string_view expected, const std::string& got) {
  std::string text("torch_marlin_metal::");
  text.append(op).append(": ").append(argument).append(": expected ").append(expected).append(", got ").append(got);
  throw std::invalid_argument(text);
}

void check_weight(std::string_view op, const WeightProblem& weight) {
  if (weight.N == 0) refuse(op, "N", "at least 1", "0");
  if (weight.K == 0 || weight.K % kBlockK != 0) refuse(op, "K", "a multiple of 8", std::to_string(weight.K));
  if (weight.group_size == 0 || group_size(weight) % kBlockK != 0) {
    refuse(op, "group_size", "a multiple of 8", std::to_string(weight.group_size));
  }
  const uint64_t scales = uint64_t{ceil_divide(weight.K, group_size(weight))} * weight.N;
  if (scales > UINT32_MAX) refuse(op, "scales", "fewer than 2^32", std::to_string(scales));
}

void check_variant(std::string_view op, const GemmProblem& problem, const GpuDevice& device) {
  const std::optional<GemmVariant> variant = problem.variant.variant();
  if (!variant || rules_of(*variant).refusal == nullptr) return;
  const std::string refusal = rules_of(*variant).refusal(problem, device);
  if (!refusal.empty()) refuse(op, "variant", refusal, "'" + problem.variant.text() + "'");
}

FunctionConstants weight_constants(const WeightProblem& weight) {
  FunctionConstants constants{};
  constants[kConstantHasPerm] = weight.has_perm;
  constants[kConstantHasGlobalScale] = weight.has_global_scale;
  constants[kConstantGlobalScalePerColumn] = weight.has_global_scale && weight.global_scale_per_column;
  constants[kConstantScalesType] = static_cast<int32_t>(weight.scales);
  constants[kConstantZerosType] = static_cast<int32_t>(weight.zeros);
  constants[kConstantSuperType] = static_cast<int32_t>(weight.super);
  constants[kConstantBlockScales] = weight.block_scales;
  constants[kConstantVectorColumns] = weight.vector_aligned && weight.N % 4 == 0;
  return constants;
}

FunctionConstants bias_constants(const GemmProblem& problem) {
  FunctionConstants constants{};
  constants[kConstantHasBias] = problem.has_bias;
  constants[kConstantBiasType] = problem.has_bias ? static_cast<int32_t>(problem.bias) : 0;
  return constants;
}

Dispatch product_dispatch(const Tiling& tiling, const GemmProblem& problem, const RowBlocks& blocks,
                          const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  const uint32_t columns = tiling.stripes != 0 ? tiling.stripes : ceil_divide(weight.N, tiling.tile.N);
  const uint32_t rows = tiling.stripes != 0 ? 1 : blocks.count;
  const bool rows_first = rules_of(tiling.variant).has_rows_along_x;
  return {.instance = {tiling.kernel, weight.format, problem.activations},
          .constants = product_constants(tiling, problem, blocks.rows, device),
          .grid = {rows_first ? rows : columns, rows_first ? columns : rows, tiling.splits},
          .threads = {tiling.simdgroups * kSimdWidth, 1, 1},
          .threadgroup_bytes = threadgroup_bytes(tiling, problem, blocks.rows),
          .params = GemmParams{problem.a_row_stride, problem.M, weight.N, weight.K, group_size(weight),
                               tiling.k_per_slice, blocks.m_begin}};
}

Plan build_plan(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  const bool is_dense = tiling.tile == TileShape{};
  Plan plan = is_dense ? plan_dequantize({problem.weight, problem.activations}, device) : Plan{};
  plan.dense_product = is_dense;
  for (uint32_t launch = 0; !is_dense && launch < launches(tiling); ++launch)
    plan.dispatches.push_back(product_dispatch(tiling, problem, row_blocks(tiling, problem.M, launch), device));
  plan.partials = partials(tiling, problem);
  if (writes_partials(tiling)) plan.dispatches.push_back(reduction(tiling, problem));
  set_seconds(plan, estimate(tiling, problem, device));
  return plan;
}

Plan plan_gemm(const GemmProblem& problem, const GpuDevice& device) {
  const std::vector<Tiling> tilings = gemm_tilings(problem, device);
  return build_plan(choose(tilings, problem), problem, device);
}

double seconds(const Plan& plan) {
  return std::accumulate(plan.dispatches.begin(), plan.dispatches.end(), 0.0,
                         [](double sum, const Dispatch& dispatch) { return sum + dispatch.seconds; });
}

void set_seconds(Plan& plan, const Estimate& estimate) {
  for (size_t i = 0; i < plan.dispatches.size(); ++i)
    plan.dispatches[i].seconds = estimate.seconds.at(i);
}

Plan plan_dequantize(const DequantizeProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  check_weight("dequantize", weight);
  const double written = double(weight.K) * weight.N * element_bytes(problem.out);
  return {.dispatches = {{.instance = {Kernel::dequantize, weight.format, problem.out},
                          .constants = weight_constants(weight),
                          .grid = elementwise_grid(weight.N, weight.K / kBlockK),
                          .threads = kElementwiseThreads,
                          .params = DequantizeParams{weight.N, weight.K, group_size(weight), 0},
                          .seconds = traffic_seconds(weight_bytes(weight) + written, device)}}};
}

}  // namespace marlin
