// Eight consecutive k of an activation row, widened to fp32 or as they are.
#pragma once

#include "decode.h"

namespace marlin {

template <typename T>
struct Activations {
  const device T* data;
  const device int* perm;
  int64_t row_stride;
  uint columns;

  template <typename R>
  MARLIN_INLINE Octet<R> load(uint m, uint k) const {
    const device T* row = data + int64_t(m) * row_stride;
    Octet<R> x;
    if (vector_activations) {
      const device vec<T, 4>* source = reinterpret_cast<const device vec<T, 4>*>(row + k);
      const vec<T, 4> low = source[0];
      const vec<T, 4> high = source[1];
      MARLIN_UNROLL for (uint i = 0; i < 4; ++i) {
        x.k[i] = R(low[i]);
        x.k[i + 4] = R(high[i]);
      }
    } else {
      MARLIN_UNROLL for (uint i = 0; i < kCodesPerWord; ++i) {
        // The host cannot look at perm: an index that is none reads nothing.
        const uint column = has_perm ? uint(perm[k + i]) : k + i;
        x.k[i] = column < columns ? R(row[column]) : R(0.0h);
      }
    }
    return x;
  }
};

}  // namespace marlin
