// Variants of the functions in api.h that take the instruction-set family as an argument, so that tests and benchmarks
// can run every family that this CPU has.
#pragma once

#include "csrc/cpu/api.h"
#include "csrc/cpu/gemm/plan.h"

namespace marlin::cpu {

// Returns the problem that the planner solves for these arguments.
Problem problem_of(const GemmArguments& arguments, Float32Precision precision);
void gemm_on(const Machine& machine, const GemmArguments& arguments, const Parallel& parallel,
             Float32Precision precision);
void dequantize_on(Isa isa, const DequantizeArguments& arguments, const Parallel& parallel);
void gptq_repack_on(Isa isa, const uint32_t* qweight, const int32_t* perm, int64_t K, int64_t N, uint32_t* out,
                    const Parallel& parallel);

}  // namespace marlin::cpu
