// The decays and weights that the gates of a chunk give, for the mLSTM's chunkwise form.
#pragma once

#include <cstdint>

#include "csrc/mlstm/cpu/kernel_table.h"

namespace marlin::cpu {

// One chunk's gates. Decays and weights are relative to a stabiliser: a token's own, or that of the state after the
// chunk. Each array is padded to whole SIMD vectors.
struct MlstmGates {
  float* f;           // forget gates as given
  float* m;           // stabiliser of each token
  float* from_state;  // decay from the state before the chunk to each token
  // The exponent of the weight of token l in the output of token j, b_j - b_l + i_l - m_j, is
  // (row_high[j] + key_high[l]) + (row_low[j] + key_low[l]): in two parts, because its terms can be large where it is
  // small.
  float* row_high;
  float* row_low;
  float* key_high;
  float* key_low;
  float* to_state;  // weight of each token in the state after the chunk
  float* floor;     // exp(-m)
  float whole;      // decay of the state over the whole chunk

  // Computes the rest from f, and from the input gates, which are in m. The state before the chunk is relative to
  // state_m. exact_m is the stabiliser before the chunk and becomes the one after it.
  void compute(const MlstmKernels& kernels, int64_t count, float state_m, double* exact_m);
};

}  // namespace marlin::cpu
