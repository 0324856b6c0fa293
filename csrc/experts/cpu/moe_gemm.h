// The products with the weights of experts on the CPU: plain pointers, no torch. The torch glue is in ops_cpu.cpp.
#pragma once

#include "csrc/gemm/cpu/gemm.h"

namespace marlin::cpu {

// A token is sent to top_k experts, one for each of its slots. A pair is a token and one of its slots. Pair t * top_k +
// s is slot s of token t: its row is multiplied by the weight of expert expert_ids[t, s].
struct MoeGemmArguments {
  PackedWeight weight;  // the weight of expert 0; each of its tensors is followed by those of experts 1, 2, ...
  int64_t experts;
  int64_t global_scale_expert_stride;  // 1 or N
  int64_t tokens;
  int64_t top_k;
  const int64_t* expert_ids;  // [tokens, top_k]; ids outside [0, experts) give rows of zeros
  const void* a;              // unit stride in k
  ElementType a_type;         // also the type of out
  int64_t a_token_stride;     // in elements
  int64_t a_slot_stride;      // 0 if the slots of a token share one row
  const int32_t* perm;        // nullptr or [experts, K]
  const void* bias;           // nullptr or [experts, N]
  ElementType bias_type;
  const void* row_weights;  // nullptr or [tokens, top_k]
  ElementType row_weights_type;
  bool reduce;  // adds the rows of a token in the order of its slots
  void* out;    // [tokens, top_k, N], or [tokens, N] with reduce
};

void moe_gemm(const MoeGemmArguments& arguments, const Parallel& parallel, Precision precision);
// Takes the machine as gemm_on does.
void moe_gemm_on(const Machine& machine, const MoeGemmArguments& arguments, const Parallel& parallel,
                 Precision precision);

}  // namespace marlin::cpu
