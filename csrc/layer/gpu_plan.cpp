#include "csrc/layer/gpu_plan.h"

#include <algorithm>

namespace marlin {

Plan plan_norm(const NormProblem& problem) {
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
                                               .unused = 0}}}};
}

Plan plan_rotary(const RotaryProblem& problem) {
  const RotaryParams& params = problem.params;
  const uint32_t columns = params.head_size - params.rotary_size / 2;
  const uint32_t heads = params.q_heads + params.k_heads;
  return {.dispatches = {
              {.instance = {.kernel = Kernel::rotary, .element = problem.element},
               .grid = {ceil_divide(columns, kRotaryWidth), ceil_divide(heads, kRotaryHeight), problem.positions},
               .threads = {kRotaryWidth, kRotaryHeight, 1},
               .params = params}}};
}

Plan plan_activation(const ActivationProblem& problem) {
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
                                                     .unused = 0}}}};
}

Plan plan_cache_write(const CacheProblem& problem) {
  const CacheParams& params = problem.params;
  const uint32_t columns = std::max(params.k_size, params.v_size);
  return {.dispatches = {{.instance = {.kernel = Kernel::write_cache, .element = problem.element},
                          .grid = {ceil_divide(columns, kCacheWidth), ceil_divide(2 * params.heads, kCacheHeight),
                                   problem.positions},
                          .threads = {kCacheWidth, kCacheHeight, 1},
                          .params = params}}};
}

}  // namespace marlin
