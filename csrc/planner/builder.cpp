#include "csrc/planner/builder.h"

#include <stdexcept>

#include "csrc/planner/estimate.h"

namespace marlin {

namespace {

FunctionConstants gemm_constants(const Tiling& tiling, const GemmProblem& problem) {
  FunctionConstants constants = weight_constants(problem.weight);
  // If K is split, the reduce kernel adds the bias, and otherwise the product kernel. striped always has splits == 1:
  // its product kernel adds the bias to every tile that one stripe computes alone, and reduce_striped adds it to all
  // other tiles.
  if (tiling.splits == 1) {
    const FunctionConstants bias = bias_constants(problem);
    for (FunctionConstant index : {kConstantHasBias, kConstantBiasType})
      constants[index] = bias[index];
  }
  constants[kConstantVectorActivations] =
      !problem.weight.has_perm && problem.vector_aligned_a && problem.a_row_stride % 4 == 0;
  constants[kConstantWritesPartials] = writes_partials(tiling);
  return constants;
}

}  // namespace

void refuse(std::string_view op, std::string_view argument, std::string_view expected, const std::string& got) {
  std::string text("torch_marlin_metal::");
  text.append(op).append(": ").append(argument).append(": expected ").append(expected).append(", got ").append(got);
  throw std::invalid_argument(text);
}

void check_weight(std::string_view op, const WeightProblem& weight) {
  if (weight.N == 0) refuse(op, "N", "at least 1", "0");
  if (weight.K == 0 || weight.K % kCodesPerWord != 0) refuse(op, "K", "a multiple of 8", std::to_string(weight.K));
  if (weight.group_size == 0 || group_size(weight) % kCodesPerWord != 0) {
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
  constants[kConstantVectorColumns] = weight.vector_aligned && weight.N % 4 == 0;
  return constants;
}

FunctionConstants bias_constants(const GemmProblem& problem) {
  FunctionConstants constants{};
  constants[kConstantHasBias] = problem.has_bias;
  constants[kConstantBiasType] = problem.has_bias ? static_cast<int32_t>(problem.bias) : 0;
  return constants;
}

void set_direct_constants(FunctionConstants& constants, const Tiling& tiling, const WeightProblem& weight,
                          uint32_t rows, const GpuDevice& device) {
  const uint32_t group = group_size(weight);
  const bool has_short_groups = group < tiling.tile.K && group < weight.K;
  constants[kConstantRows] = static_cast<int32_t>(rows);
  constants[kConstantSubnormalCodes] = device.half_subnormals;
  constants[kConstantShortGroupSize] = has_short_groups ? static_cast<int32_t>(group) : 0;
  constants[kConstantRaggedK] = weight.K % tiling.tile.K != 0;
  constants[kConstantRaggedN] = weight.N % rules_of(tiling.variant).simdgroup_columns != 0;
}

Dispatch product_dispatch(const Tiling& tiling, const GemmProblem& problem, const RowBlocks& blocks, Extent grid) {
  const WeightProblem& weight = problem.weight;
  return {.instance = {tiling.kernel, weight.format, problem.activations},
          .constants = gemm_constants(tiling, problem),
          .grid = grid,
          .threads = {tiling.simdgroups * kSimdWidth, 1, 1},
          .threadgroup_bytes = threadgroup_bytes(tiling, problem, blocks.rows),
          .params = GemmParams{problem.a_row_stride, problem.M, weight.N, weight.K, group_size(weight),
                               tiling.k_per_slice, blocks.m_begin}};
}

void add_reduction(Plan& plan, const Tiling& tiling, const GemmProblem& problem) {
  if (tiling.splits == 1) return;
  plan.partials = partials(tiling, problem);
  plan.dispatches.push_back({.instance = {.kernel = Kernel::reduce, .element = problem.activations},
                             .constants = bias_constants(problem),
                             .grid = reduction_grid(tiling, problem),
                             .threads = kElementwiseThreads,
                             .params = ReduceParams{problem.M, problem.weight.N, tiling.splits, 0}});
}

uint64_t resident_threadgroups(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t bytes = tile_threadgroup_bytes(row.tile, problem.activations, row.stages);
  const uint32_t registers = half_registers(row, problem, row.tile.M, device);
  const Occupancy held = occupancy(tile_threads(row.tile), registers, bytes, family_of(*device.chip));
  return uint64_t{device.cores} * held.threadgroups;
}

}  // namespace marlin
