// Variants of the functions in api.h that take the instruction-set family as an argument, so that tests and benchmarks
// can run every family that this CPU has.
#pragma once

#include <span>

#include "csrc/cpu/api.h"
#include "csrc/cpu/gemm/plan.h"

namespace marlin::cpu {

// Returns the machine that the functions in api.h run on.
Machine this_machine(const Parallel& parallel);

// Returns the problem that the planner solves for these arguments.
Problem problem_of(const GemmArguments& arguments, Float32Precision precision);
void gemm_on(const Machine& machine, const GemmArguments& arguments, const Parallel& parallel,
             Float32Precision precision);
// Computes products of weights of one format, K, N and group size side by side, on all threads.
void gemm_group_on(const Machine& machine, std::span<const GemmArguments> products, const Parallel& parallel,
                   Float32Precision precision);
void moe_gemm_on(const Machine& machine, const MoeGemmArguments& arguments, const Parallel& parallel,
                 Float32Precision precision);
void dequantize_on(Isa isa, const DequantizeArguments& arguments, const Parallel& parallel);
void gptq_repack_on(Isa isa, const uint32_t* qweight, const int32_t* perm, int64_t K, int64_t N, uint32_t* out,
                    const Parallel& parallel);

}  // namespace marlin::cpu
