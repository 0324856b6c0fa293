// The mLSTM on the CPU: plain pointers, no torch. The torch glue is in ops_cpu.cpp.
#pragma once

#include "csrc/mlstm/cpu/plan.h"

namespace marlin::cpu {

// One of q, k, v, i and f. Strides are in elements; the last dimension of q, k and v has stride 1.
struct MlstmInput {
  const void* data;
  ElementType type;  // meaningless if MlstmArguments::wide
  int64_t stride_b;
  int64_t stride_h;
  int64_t stride_s;
};

// States, contiguous: C [B, H, slots, DK, DV], n [B, H, slots, DK], m [B, H, slots]; fp32, or fp64 if
// MlstmArguments::wide.
template <class Pointer>
struct MlstmStates {
  Pointer C;
  Pointer n;
  Pointer m;
  int64_t slots;
};

struct MlstmArguments {
  int64_t B;
  int64_t H;
  int64_t S;
  int64_t DK;
  int64_t DV;
  bool wide;     // inputs, states, h, N and M are fp64
  MlstmInput q;  // data is nullptr if only states are needed
  MlstmInput k;
  MlstmInput v;
  MlstmInput i;
  MlstmInput f;
  double eps;
  // If given_states is false, `in` is the state before the first token. If it is true, slot c of `in` holds the state
  // before chunk c. nullptr stands for a zero state.
  MlstmStates<const void*> in;
  bool given_states;
  // Receives the final state if chunks_per_slot is 0. Otherwise, slot c receives the state before chunk c *
  // chunks_per_slot. nullptr means that no state is needed.
  MlstmStates<void*> out;
  int64_t chunks_per_slot;
  void* h;  // [B, H, S, DV] in the type of q
  void* N;  // [B, H, S] or nullptr
  void* M;
};

// Computes the recurrence token by token. This form is the reference for tests, and the fastest for one or two tokens.
void mlstm_sequential(const MlstmArguments& arguments, const MlstmPlan& plan, const Parallel& parallel);
// Computes matrix products chunk by chunk. It supports fp32 only.
void mlstm_chunkwise(const MlstmArguments& arguments, const MlstmPlan& plan, const Parallel& parallel);

}  // namespace marlin::cpu
