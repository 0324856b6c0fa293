#include "plan_parts.h"

#include "cost.h"

namespace marlin {

Extent elementwise_grid(uint32_t columns, uint32_t rows) {
  return {ceil_divide(columns, kElementwiseWidth), ceil_divide(rows, kElementwiseHeight), 1};
}

uint32_t resident_threadgroups(Kernel kernel, WeightFormat format, TileShape tile, uint32_t threadgroup_bytes,
                               const GpuDevice& device) {
  const KernelCounts& counts = counts_of(kernel, format, tile);
  return occupancy(tile_threads(tile), counts.half_registers, threadgroup_bytes, family_of(*device.chip)).threadgroups;
}

FunctionConstants weight_constants(const WeightProblem& weight) {
  FunctionConstants constants{};
  constants[kConstantHasPerm] = weight.has_perm;
  constants[kConstantHasGlobalScale] = weight.has_global_scale;
  constants[kConstantGlobalScalePerColumn] = weight.has_global_scale && weight.global_scale_per_column;
  constants[kConstantScalesType] = static_cast<int32_t>(weight.scales);
  constants[kConstantZerosType] = static_cast<int32_t>(weight.zeros);
  constants[kConstantVectorColumns] = weight.vector_aligned && weight.N % 4 == 0;
  return constants;
}

FunctionConstants bias_constants(const GemmProblem& problem) {
  FunctionConstants constants{};
  constants[kConstantHasBias] = problem.has_bias;
  constants[kConstantBiasType] = problem.has_bias ? static_cast<int32_t>(problem.bias) : 0;
  return constants;
}

FunctionConstants gemm_constants(const GemmProblem& problem, bool writes_partials) {
  FunctionConstants constants = weight_constants(problem.weight);
  if (!writes_partials) {
    for (FunctionConstant index : {kConstantHasBias, kConstantBiasType})
      constants[index] = bias_constants(problem)[index];
  }
  constants[kConstantVectorActivations] =
      !problem.weight.has_perm && problem.vector_aligned_a && problem.a_row_stride % 4 == 0;
  constants[kConstantWritesPartials] = writes_partials;
  return constants;
}

GemmParams gemm_params(const GemmProblem& problem, uint32_t k_per_slice) {
  return {problem.a_row_stride, problem.M, problem.weight.N, problem.weight.K, group_size(problem.weight),
          k_per_slice,          0};
}

std::string name(TileShape tile) {
  return std::to_string(tile.M) + "x" + std::to_string(tile.N) + "x" + std::to_string(tile.K);
}

std::string tile_refusal(TileShape tile, ElementType activations, uint32_t stages) {
  const uint32_t bytes = tile_threadgroup_bytes(tile, activations, stages);
  if (bytes <= kMostThreadgroupBytes) return "";
  return name(tile) + " in " + std::to_string(stages) + (stages == 1 ? " stage" : " stages") + " with " +
         std::string(name(activations)) + " activations needs " + std::to_string(bytes) +
         " bytes of threadgroup memory, a threadgroup has at most " + std::to_string(kMostThreadgroupBytes);
}

uint32_t slice_length(const GemmProblem& problem, uint32_t wanted, uint32_t unit) {
  const uint32_t group = group_size(problem.weight);
  const uint32_t even = round_up(ceil_divide(problem.weight.K, wanted), unit);
  if (even < group) return round_up(group / (group / even), unit);
  return group % unit == 0 ? round_up(even, group) : even;
}

void add_reduction(Plan& plan, const GemmProblem& problem, uint32_t slices) {
  if (slices == 1) return;
  plan.partials = {problem.weight.N, problem.M, slices};
  plan.dispatches.push_back({.kernel = Kernel::reduce,
                             .function = host_name(Kernel::reduce, problem.weight.format, problem.activations),
                             .constants = bias_constants(problem),
                             .grid = elementwise_grid(problem.weight.N, problem.M),
                             .threads = kElementwiseThreads,
                             .params = ReduceParams{problem.M, problem.weight.N, slices, 0}});
}

}  // namespace marlin
