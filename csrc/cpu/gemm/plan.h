// The CPU half of the planner: which kernel, which blocks, how the work is split. A pure function of its argument.
#pragma once

#include <cstdint>
#include <string>

#include "capability.h"
#include "kernels.h"

namespace marlin::cpu {

struct Machine {
  Isa isa;
  bool fast_bf16_dot;
  int threads;
  bool byte_dot = false;
};

struct Problem {
  int64_t M;
  int64_t N;
  int64_t K;
  WeightFormat format;
  int64_t group_size;
  ElementType a_type;
  int code_parts;  // bf16 parts whose sums are the codes' numbers: one but for most lookup tables; 0 where none are
  Float32Precision precision;
};

enum class Kernel : int {
  few_rows,
  many_rows,
  bf16_dot_fp32_row,
  bf16_dot_few_rows,
  bf16_dot,
  planes_avx2,
  planes_few_rows,
  planes,
  amx,
  amx_scaled,
  amx_table
};

inline bool in_planes(Kernel kernel) {
  return kernel == Kernel::planes_avx2 || kernel == Kernel::planes_few_rows || kernel == Kernel::planes;
}

// What the planner must know of a kernel's shape; the kernels' own tables are checked against it.
struct KernelShape {
  int strip;     // columns
  int max_rows;  // rows of one block
  int row_unit;  // a block starts at a multiple of this
};

struct Plan {
  Kernel kernel;
  int parts;           // bf16 parts of an activation, 1 where the kernel computes in fp32
  int64_t strip;       // columns that a kernel call works on
  int64_t max_rows;    // rows of one kernel call, at most
  int64_t row_unit;    // a row block starts at a multiple of this
  int64_t passes;      // the rows are packed and multiplied in this many nearly equal parts
  int64_t block_rows;  // rows and columns whose fp32 results stay in the cache
  int64_t block_columns;
  int64_t row_tasks;  // row_tasks * column_tasks * k_slices tasks, one a thread or fewer
  int64_t column_tasks;
  int64_t k_slices;  // more than one: partial sums in fp32, added in the order of k
};

KernelShape kernel_shape(Isa isa, Kernel kernel);
Plan make_plan(const Machine& machine, const Problem& problem);
// The plan for what `failed` cannot represent: the scales of a panel, then activations, for which fp32 is left.
Plan make_fallback_plan(const Machine& machine, const Problem& problem, const Plan& failed);
std::string to_string(const Plan& plan);

}  // namespace marlin::cpu
