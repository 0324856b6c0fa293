// Plans the kernels that look up rows of a packed weight or repack it, for a GPU: one dispatch each. Pure C++: no
// torch, no Metal.
#pragma once

#include "csrc/planner/plan.h"

namespace marlin {

// Like those in csrc/planner/problem.h, these problems have no padding and no floats.
struct EmbeddingProblem {
  WeightProblem weight{};
  uint32_t count = 0;    // ids
  Flag wide_ids = true;  // int64, otherwise int32
  ElementType out = ElementType::float16;
};

struct RepackProblem {
  Kernel kernel = Kernel::gptq_repack;  // one of the kernels in weights/repack.metal
  uint32_t rows = 0;                    // rows and columns of the kernel's grid, see kernel_list.h
  uint32_t columns = 0;
  Flag has_perm{};
  StoredZeros stored_zeros = StoredZeros::plain;
  uint32_t code_bits = 4;
  uint32_t thread_bytes = 0;  // that a thread of the grid reads and writes
};

// Both throw std::invalid_argument if no kernel can compute the problem.
Plan plan_embedding(const EmbeddingProblem& problem, const GpuDevice& device);
Plan plan_repack(const RepackProblem& problem, const GpuDevice& device);

}  // namespace marlin
