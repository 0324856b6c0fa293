// The mLSTM on the CPU, with plain pointers and without torch. ops_cpu.cpp has the operators on tensors.
#pragma once

#include "csrc/mlstm/cpu/plan.h"

namespace marlin::cpu {

// One of the tensors q, k, v, i and f. Strides are in elements; the last dimension of q, k and v has stride 1.
struct MlstmInput {
  const void* data;
  ElementType type;  // meaningless if MlstmArguments::wide
  int64_t stride_b;
  int64_t stride_h;
  int64_t stride_s;
};

// Contiguous states: C [B, H, slots, DK, DV], n [B, H, slots, DK], m [B, H, slots]. They are fp64 if
// MlstmArguments::wide, otherwise fp32.
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
  MlstmInput q;  // data is nullptr if the caller needs only states
  MlstmInput k;
  MlstmInput v;
  MlstmInput i;
  MlstmInput f;
  double eps;
  // The input states. If given_states is false, `in` is the state before the first token. If given_states is true, slot
  // c of `in` is the state before chunk c. nullptr means a zero state.
  MlstmStates<const void*> in;
  bool given_states;
  // The output states. If chunks_per_slot is 0, `out` receives the final state. Otherwise, slot c of `out` receives the
  // state before chunk c * chunks_per_slot. nullptr means that the caller needs no state.
  MlstmStates<void*> out;
  int64_t chunks_per_slot;
  void* h;  // [B, H, S, DV] in the type of q
  void* N;  // [B, H, S] or nullptr
  void* M;
};

// Computes the recurrence token by token. Tests use this form as the reference. It is the fastest form for one or two
// tokens.
void mlstm_sequential(const MlstmArguments& arguments, const MlstmPlan& plan, const Parallel& parallel);
// Computes the chunks with matrix products, in fp32 only.
void mlstm_chunkwise(const MlstmArguments& arguments, const MlstmPlan& plan, const Parallel& parallel);

}  // namespace marlin::cpu
