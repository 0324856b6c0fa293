// Stores sums. Without a split of K, adds the bias, rounds once and stores the results in the output. Otherwise stores
// the sums in one split of the partial sums.
#pragma once

#include "kernels/gemm/function_constants.h"

namespace marlin {

template <typename T>
struct Output {
  const device uchar* bias;
  device T* out;
  device float* partials;
  uint M;
  uint N;

  // Returns the rounded result for a sum of column n, including the bias.
  MARLIN_INLINE T rounded(uint n, float sum) const thread {
    return T(has_bias ? sum + load_element(bias, n, bias_type) : sum);
  }

  MARLIN_INLINE void store(uint m, uint n, float sum) const thread { out[ulong(m) * N + n] = rounded(n, sum); }

  // Stores four columns. The allocator aligns the start of `out` and `partials`, so vector stores are aligned if N is a
  // multiple of 4.
  MARLIN_INLINE void store_columns(uint split, uint m, uint n, float4 sums) const thread {
    MARLIN_UNROLL for (uint c = 0; c < 4; ++c) {
      if (vector_columns || n + c < N) store_split(split, m, n + c, sums[c]);
    }
  }

  MARLIN_INLINE void store_split(uint split, uint m, uint n, float sum) const thread {
    if (writes_partials) {
      partials[(ulong(split) * M + m) * N + n] = sum;
    } else {
      store(m, n, sum);
    }
  }
};

}  // namespace marlin
