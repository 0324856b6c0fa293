// gemm on the CPU, with plain pointers and without torch. ops_cpu.cpp has the operator on tensors.
#pragma once

#include <span>

#include "csrc/gemm/cpu/plan.h"
#include "csrc/weights/cpu/api.h"

namespace marlin::cpu {

struct GemmArguments {
  PackedWeight weight;
  int64_t M;
  const void* a;         // [M, K], unit stride in k
  ElementType a_type;    // also the type of out
  int64_t a_row_stride;  // in elements; may be 0
  const int32_t* perm;   // nullptr, or [K]: packed row j multiplies a[m, perm[j]]
  const void* bias;      // nullptr or [N]
  ElementType bias_type;
  void* out;  // [M, N] contiguous

  // For rows that are not evenly spaced, if not nullptr:
  const int64_t* a_starts = nullptr;  // [M]: row m of a starts at element a_starts[m]; a_row_stride is not used
  const int64_t* out_rows = nullptr;  // [M]: row m of the product is row out_rows[m] of out
  bool fp32_out = false;              // true if out is fp32 for any a_type
  bool rounds = false;                // true if the weight may be rounded to bf16
};

// Functions whose names end in _on take the machine as an argument, so that tests and benchmarks can run every
// instruction set of this CPU.

// Returns the problem that the planner solves for these arguments.
CpuProblem problem_of(const GemmArguments& arguments, Precision precision);
void gemm_on(const Machine& machine, const GemmArguments& arguments, const Parallel& parallel, Precision precision);
// Computes several products at the same time, on all threads. Their weights have the same format, K, N and group size.
void gemm_group_on(const Machine& machine, std::span<const GemmArguments> products, const Parallel& parallel,
                   Precision precision);

}  // namespace marlin::cpu
