#include "csrc/decoder/gpu_plan.h"

#include <algorithm>

#include "csrc/planner/rates.h"

namespace marlin {

namespace {

double seconds_of(double elements, ElementType element, const GpuDevice& device) {
  return traffic_seconds(elements * element_bytes(element), device);
}

}  // namespace

Plan plan_norm(const NormProblem& problem, const GpuDevice& device) {
  const double moved = (problem.has_residual ? 4.0 : 2.0) * problem.rows * problem.columns;
  return {.dispatches = {{.instance = {.kernel = Kernel::rms_norm, .element = problem.element},
                          .grid = {problem.rows, 1, 1},
                          .threads = {norm_threads(problem.columns), 1, 1},
                          .threadgroup_bytes = kNormBytes,
                          .params = NormParams{.x_stride = problem.x_stride,
                                               .residual_stride = problem.residual_stride,
                                               .columns = problem.columns,
                                               .eps = problem.eps,
                                               .weight_offset = problem.weight_offset,
                                               .weight_type = static_cast<int32_t>(problem.weights),
                                               .has_residual = problem.has_residual,
                                               .unused = 0},
                          .seconds = seconds_of(moved, problem.element, device)}}};
}

Plan plan_rotary(const RotaryProblem& problem, const GpuDevice& device) {
  const RotaryParams& params = problem.params;
  const uint32_t columns = params.head_size - params.rotary_size / 2;  // pairs, then the elements that are not rotated
  const uint32_t heads = params.q_heads + params.k_heads;
  const double moved = 2.0 * problem.positions * heads * params.head_size;
  return {.dispatches = {
              {.instance = {.kernel = Kernel::rotary, .element = problem.element},
               .grid = {ceil_divide(columns, kRotaryWidth), ceil_divide(heads, kRotaryHeight), problem.positions},
               .threads = {kRotaryWidth, kRotaryHeight, 1},
               .params = params,
               .seconds = seconds_of(moved, problem.element, device)}}};
}

Plan plan_activation(const ActivationProblem& problem, const GpuDevice& device) {
  return {.dispatches = {{.instance = {.kernel = Kernel::gated_activation, .element = problem.element},
                          .grid = elementwise_grid(problem.columns, problem.rows),
                          .threads = {kElementwiseWidth, kElementwiseHeight, 1},
                          .params = ActivationParams{.gate_row = problem.gate_row,
                                                     .up_row = problem.up_row,
                                                     .gate_column = problem.gate_column,
                                                     .up_column = problem.up_column,
                                                     .rows = problem.rows,
                                                     .columns = problem.columns,
                                                     .activation = static_cast<int32_t>(problem.activation),
                                                     .limit = problem.limit,
                                                     .alpha = problem.alpha,
                                                     .unused = 0},
                          .seconds = seconds_of(3.0 * problem.rows * problem.columns, problem.element, device)}}};
}

Plan plan_cache_write(const CacheProblem& problem, const GpuDevice& device) {
  const CacheParams& params = problem.params;
  const uint32_t columns = std::max(params.k_size, params.v_size);
  const double moved = 2.0 * problem.positions * params.heads * (double(params.k_size) + params.v_size);
  return {.dispatches = {{.instance = {.kernel = Kernel::write_cache, .element = problem.element},
                          .grid = {ceil_divide(columns, kCacheWidth), ceil_divide(2 * params.heads, kCacheHeight),
                                   problem.positions},
                          .threads = {kCacheWidth, kCacheHeight, 1},
                          .params = params,
                          .seconds = seconds_of(moved, problem.element, device)}}};
}

}  // namespace marlin
