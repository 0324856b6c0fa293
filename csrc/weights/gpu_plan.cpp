#include "csrc/weights/gpu_plan.h"

#include "csrc/planner/estimate.h"
#include "csrc/planner/variants.h"

namespace marlin {

Plan plan_embedding(const EmbeddingProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  check_weight("embedding", weight);
  if (problem.count == 0) refuse("embedding", "ids", "at least 1", "0");
  const double bytes_of_a_row = weight_bytes(weight) / weight.N + double(weight.K) * element_bytes(problem.out);
  return {.dispatches = {{.instance = {Kernel::embedding, weight.format, problem.out},
                          .constants = weight_constants(weight),
                          .grid = elementwise_grid(weight.K / kBlockK, problem.count),
                          .threads = kElementwiseThreads,
                          .params = EmbeddingParams{weight.N, weight.K, group_size(weight), problem.count,
                                                    problem.wide_ids ? 8U : 4U},
                          .seconds = traffic_seconds(problem.count * bytes_of_a_row, device)}}};
}

Plan plan_repack(const RepackProblem& problem, const GpuDevice& device) {
  const std::string_view op = info(problem.kernel).name;
  if (info(problem.kernel).library != "weights/repack")
    refuse("repack", "kernel", "one of weights/repack", std::string(op));
  if (problem.rows == 0) refuse(op, "rows", "at least 1", "0");
  if (problem.columns == 0) refuse(op, "columns", "at least 1", "0");
  Dispatch dispatch{.instance = {problem.kernel},
                    .grid = elementwise_grid(problem.columns, problem.rows),
                    .threads = kElementwiseThreads,
                    .params = RepackParams{problem.rows, problem.columns, static_cast<int32_t>(problem.stored_zeros),
                                           problem.code_bits},
                    .seconds = traffic_seconds(double(problem.thread_bytes) * problem.rows * problem.columns, device)};
  dispatch.constants[kConstantHasPerm] = problem.has_perm;
  return {.dispatches = {std::move(dispatch)}};
}

}  // namespace marlin
