// The CPU planner: which kernel, which blocks, how the work is split. Pure functions of their arguments.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/cpu/api.h"
#include "csrc/cpu/capability.h"

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
  int code_parts;  // bf16 terms that represent every code exactly: 1 except for most lookup tables; 0 if impossible
  Float32Precision precision;
};

enum class Kernel : int {
  small_m,
  large_m,
  bf16_dot_fp32_row,
  bf16_dot_small_m,
  bf16_dot,
  byte_split_avx2,
  byte_split_small_m,
  byte_split,
  amx,
  amx_scaled,
  amx_table
};

inline bool is_byte_split(Kernel kernel) {
  return kernel == Kernel::byte_split_avx2 || kernel == Kernel::byte_split_small_m || kernel == Kernel::byte_split;
}

// The shape of a kernel as the planner knows it; a test compares it with the kernels' own tables.
struct KernelShape {
  int strip;     // columns
  int max_rows;  // rows of one block
  int row_unit;  // a block starts at a multiple of this
};

struct Plan {
  Kernel kernel;
  int parts;           // bf16 parts of an activation; 1 if the kernel computes in fp32
  int64_t strip;       // columns of one kernel call
  int64_t max_rows;    // at most so many rows of one kernel call
  int64_t row_unit;    // a row block starts at a multiple of this
  int64_t passes;      // the rows are packed and multiplied in this many nearly equal parts
  int64_t block_rows;  // the fp32 results of block_rows x block_columns stay in the cache
  int64_t block_columns;
  int64_t row_tasks;  // row_tasks * column_tasks * k_slices is at most the number of threads
  int64_t column_tasks;
  int64_t k_slices;  // if more than one, partial sums in fp32 are added in the order of k
};

KernelShape kernel_shape(Isa isa, Kernel kernel);
Plan make_plan(const Machine& machine, const Problem& problem);
// The plan for values that `failed` cannot represent: scaled panels fall back to unscaled ones, then to fp32 kernels.
Plan make_fallback_plan(const Machine& machine, const Problem& problem, const Plan& failed);
std::string to_string(const Plan& plan);

}  // namespace marlin::cpu
