// What the gates of a chunk come to in the mLSTM's chunkwise form.
#pragma once

#include <cstdint>

#include "mlstm_kernels.h"

namespace marlin::cpu {

// Everything in the stabilised units of the chunk's tokens or of the next state. Arrays have room for whole vectors.
struct MlstmGates {
  float* f;           // as given
  float* m;           // of each token
  float* from_state;  // decay of the state before the chunk up to each token
  float* row_high;    // the exponent of the weight of token l in the output of token j:
  float* row_low;     //   (row_high[j] + key_high[l]) + (row_low[j] + key_low[l])
  float* key_high;    // in two parts, since b_j - b_l + i_l - m_j is small where it matters and its terms need not be
  float* key_low;
  float* to_state;  // weight of each token in the state after the chunk
  float* floor;     // exp(-m)
  float whole;      // decay of the state through the whole chunk

  // From f, and from i in m. The state before the chunk is relative to state_m; exact_m is the stabiliser before the
  // chunk, then the one after it.
  void compute(const MlstmKernels& kernels, int64_t count, float state_m, double* exact_m);
};

}  // namespace marlin::cpu
