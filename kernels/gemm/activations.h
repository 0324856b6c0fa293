// Loads the activations of two, four or eight consecutive k of a row.
#pragma once

#include "kernels/gemm/decode.h"

namespace marlin {

template <typename T>
struct Activations {
  const device T* data;
  const device int* perm;
  int64_t row_stride;
  uint columns;

  MARLIN_INLINE const device T* row_at(uint m) const thread { return data + int64_t(m) * row_stride; }

  // Loads a row's activations of kCount consecutive k. Without a permutation, `first` is the address of the row's
  // element k. With a permutation, `first` is the address of the row's start, and the elements are at perm[k], perm[k +
  // 1] and so on.
  template <uint kCount>
  MARLIN_INLINE vec<T, kCount> load_run(const device T* first, uint k) const thread {
    if (vector_activations) return *reinterpret_cast<const device vec<T, kCount>*>(first);
    vec<T, kCount> x = vec<T, kCount>(T(0.0f));
    // The host cannot check the values of perm, so an index outside the row loads zero.
    MARLIN_UNROLL for (uint i = 0; i < kCount; ++i) {
      const uint column = has_perm ? uint(perm[k + i]) : i;
      if (!has_perm || column < columns) x[i] = first[column];
    }
    return x;
  }

  MARLIN_INLINE vec<T, 4> load_quad(const device T* first, uint k) const thread { return load_run<4>(first, k); }
  MARLIN_INLINE vec<T, 2> load_pair(const device T* first, uint k) const thread { return load_run<2>(first, k); }

  // Loads the activations of eight consecutive k and converts them to R.
  template <typename R>
  MARLIN_INLINE Vec8<R> load_vec8(const device T* first, uint k) const thread {
    const vec<T, 4> low = load_quad(first, k);
    const vec<T, 4> high = load_quad(first + (has_perm ? 0 : 4), k + 4);
    Vec8<R> x;
    MARLIN_UNROLL for (uint i = 0; i < 4; ++i) {
      x.k[i] = R(low[i]);
      x.k[i + 4] = R(high[i]);
    }
    return x;
  }

  template <typename R>
  MARLIN_INLINE Vec8<R> load(uint m, uint k) const thread {
    return load_vec8<R>(row_at(m) + (has_perm ? 0 : k), k);
  }
};

}  // namespace marlin
