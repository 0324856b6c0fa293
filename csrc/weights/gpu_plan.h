// Plans the GPU kernels that look up rows of a packed weight or repack it. Each plan is one dispatch. Uses neither
// torch nor Metal.
#pragma once

#include "csrc/planner/plan.h"

namespace marlin {

// These problems have no padding and no floats, for the reason in csrc/planner/problem.h.
struct EmbeddingProblem {
  WeightProblem weight{};
  uint32_t count = 0;    // the number of ids
  Flag wide_ids = true;  // true if ids are int64, false if they are int32
  ElementType out = ElementType::float16;
};

struct RepackProblem {
  Kernel kernel = Kernel::gptq_repack;  // one of the kernels in weights/repack.metal
  uint32_t rows = 0;                    // rows and columns of the kernel's grid, see kernel_list.h
  uint32_t columns = 0;
  Flag has_perm{};
  StoredZeros stored_zeros = StoredZeros::plain;
  uint32_t code_bits = 4;
  uint32_t thread_bytes = 0;  // bytes that one thread of the grid reads and writes
};

// Both functions throw std::invalid_argument if no kernel can compute the problem.
Plan plan_embedding(const EmbeddingProblem& problem, const GpuDevice& device);
Plan plan_repack(const RepackProblem& problem, const GpuDevice& device);

}  // namespace marlin
