// moe_gemm on the CPU, with plain pointers and without torch. ops_cpu.cpp has the operator on tensors.
#pragma once

#include "csrc/gemm/cpu/gemm.h"

namespace marlin::cpu {

// The router sends a token to top_k experts, one for each of the token's slots. A pair is a token and one of its slots,
// with the number token * top_k + slot. The pair's row of `a` is multiplied by the weight of expert expert_ids[token,
// slot].
struct MoeGemmArguments {
  PackedWeight weight;  // the weight of expert 0; in memory, the weights of experts 1, 2, ... follow in each tensor
  int64_t experts;
  int64_t global_scale_expert_stride;  // 1 or N
  int64_t tokens;
  int64_t top_k;
  const int64_t* expert_ids;  // [tokens, top_k]; ids outside [0, experts) give rows of zeros
  const void* a;              // unit stride in k
  ElementType a_type;         // also the type of out
  int64_t a_token_stride;     // in elements
  int64_t a_slot_stride;      // in elements; 0 if the slots of a token share one row
  const int32_t* perm;        // nullptr or [experts, K]
  const void* bias;           // nullptr or [experts, N]
  ElementType bias_type;
  const void* row_weights;  // nullptr or [tokens, top_k]
  ElementType row_weights_type;
  bool reduce;  // true to add the products of a token, in the order of its slots
  void* out;    // [tokens, top_k, N], or [tokens, N] with reduce
};

void moe_gemm(const MoeGemmArguments& arguments, const Parallel& parallel, Precision precision);
// Runs on `machine`, as gemm_on does.
void moe_gemm_on(const Machine& machine, const MoeGemmArguments& arguments, const Parallel& parallel,
                 Precision precision);

}  // namespace marlin::cpu
