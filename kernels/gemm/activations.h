// Four or eight consecutive k of an activation row.
#pragma once

#include "decode.h"

namespace marlin {

template <typename T>
struct Activations {
  const device T* data;
  const device int* perm;
  int64_t row_stride;
  uint columns;

  MARLIN_INLINE const device T* row_at(uint m) const { return data + int64_t(m) * row_stride; }

  // Consecutive k, of which `first` is the first; through perm it is the row's own first and k the place in perm.
  template <uint kCount>
  MARLIN_INLINE vec<T, kCount> load_run(const device T* first, uint k) const {
    if (vector_activations) return *reinterpret_cast<const device vec<T, kCount>*>(first);
    vec<T, kCount> x = vec<T, kCount>(T(0.0f));
    // The host cannot look at perm: an index that is none reads nothing.
    MARLIN_UNROLL for (uint i = 0; i < kCount; ++i) {
      const uint column = has_perm ? uint(perm[k + i]) : i;
      if (!has_perm || column < columns) x[i] = first[column];
    }
    return x;
  }

  MARLIN_INLINE vec<T, 4> load_quad(const device T* first, uint k) const { return load_run<4>(first, k); }
  MARLIN_INLINE vec<T, 2> load_pair(const device T* first, uint k) const { return load_run<2>(first, k); }

  // Eight, as R.
  template <typename R>
  MARLIN_INLINE Octet<R> load_octet(const device T* first, uint k) const {
    const vec<T, 4> low = load_quad(first, k);
    const vec<T, 4> high = load_quad(first + (has_perm ? 0 : 4), k + 4);
    Octet<R> x;
    MARLIN_UNROLL for (uint i = 0; i < 4; ++i) {
      x.k[i] = R(low[i]);
      x.k[i + 4] = R(high[i]);
    }
    return x;
  }

  template <typename R>
  MARLIN_INLINE Octet<R> load(uint m, uint k) const {
    return load_octet<R>(row_at(m) + (has_perm ? 0 : k), k);
  }
};

}  // namespace marlin
