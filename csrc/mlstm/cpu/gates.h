// Computes the decays and weights of a chunk from its gates, for the chunkwise mLSTM.
#pragma once

#include <cstdint>

#include "csrc/mlstm/cpu/kernel_table.h"

namespace marlin::cpu {

// The gates of one chunk, and the decays and weights that follow from them. Decays and weights are scaled by exp(-m),
// where m is the stabiliser of the token or of the state after the chunk. Each array is padded to whole SIMD vectors.
struct MlstmGates {
  float* f;           // the forget gates of the input
  float* m;           // stabiliser of each token
  float* from_state;  // decay from the state before the chunk to each token
  // The weight of token l in the output of token j is exp(b_j - b_l + i_l - m_j). The terms of this exponent can be
  // large although the exponent is small, so rounded terms would give a wrong exponent. Each term is therefore stored
  // as a high and a low part: the exponent is (row_high[j] + key_high[l]) + (row_low[j] + key_low[l]).
  float* row_high;
  float* row_low;
  float* key_high;
  float* key_low;
  float* to_state;  // weight of each token in the state after the chunk
  float* floor;     // exp(-m)
  float whole;      // decay of the state over the whole chunk

  // Computes all other fields. The caller stores the forget gates in f and the input gates in m. The state before the
  // chunk is scaled by exp(-state_m). The caller sets *exact_m to the stabiliser before the chunk; compute() replaces
  // it by the stabiliser after the chunk.
  void compute(const MlstmKernels& kernels, int64_t count, float state_m, double* exact_m);
};

}  // namespace marlin::cpu
