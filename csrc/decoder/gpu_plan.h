// Plans the decoder layer's operators for a GPU. Each plan is one dispatch. Uses neither torch nor Metal.
#pragma once

#include <cstdint>

#include "csrc/planner/plan.h"

namespace marlin {

// These problems have no padding and no floats, for the reason in csrc/planner/problem.h. `element` is the type of
// inputs and outputs. No size is 0.
struct NormProblem {
  int64_t x_stride = 0;
  int64_t residual_stride = 0;
  uint32_t rows = 0;
  uint32_t columns = 0;
  FloatBits eps{};
  FloatBits weight_offset{};
  ElementType weights{};
  Flag has_residual{};
  ElementType element{};
  uint32_t unused = 0;
};

struct RotaryProblem {
  RotaryParams params{};
  uint32_t positions = 0;  // batches * tokens
  ElementType element{};
};

struct ActivationProblem {
  int64_t gate_row = 0, up_row = 0, gate_column = 0, up_column = 0;  // strides
  uint32_t rows = 0;
  uint32_t columns = 0;
  Activation activation{};
  FloatBits limit{};
  FloatBits alpha{};
  ElementType element{};
};

struct CacheProblem {
  CacheParams params{};
  uint32_t positions = 0;  // batches * tokens
  ElementType element{};
};

Plan plan_norm(const NormProblem& problem, const GpuDevice& device);
Plan plan_rotary(const RotaryProblem& problem, const GpuDevice& device);
Plan plan_activation(const ActivationProblem& problem, const GpuDevice& device);
Plan plan_cache_write(const CacheProblem& problem, const GpuDevice& device);

}  // namespace marlin
