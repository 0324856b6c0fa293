// Operations between the lanes of a simdgroup: folds, scans, shuffles and matrices. functions.h includes this file.
#pragma once

namespace air {

AIR_FUNCTION uint32_t lane() { return sm_self->thread_index_in_simdgroup; }

template <class T>
struct exchange {
  const T* slots;
  uint32_t active;
  AIR_FUNCTION SM_CONVERGENT explicit exchange(const T& mine) {
    const void* deposits;
    active = sm_simd_exchange(&mine, sizeof(T), &deposits);
    slots = static_cast<const T*>(deposits);
  }
  bool takes_part(uint32_t i) const { return i < 32 && (active & (1u << i)) != 0; }
  AIR_UNCHECKED T from(uint32_t i) const {
    if (!takes_part(i)) sm_report_inactive_lane(i);
    return slots[i % 32];
  }
};

// Combines the values of `width` lanes. The order of Apple's back end is not known. Like msl/include/metal_simdgroup,
// this function first combines lanes that are half the width apart.
template <class T, class F>
AIR_UNCHECKED T folded(const exchange<T>& all, uint32_t first, uint32_t width, F combine) {
  T part[32];
  bool filled[32];
  for (uint32_t i = 0; i < width; ++i) {
    part[i] = all.slots[first + i];
    filled[i] = all.takes_part(first + i);
  }
  for (uint32_t half = width; half /= 2;) {
    for (uint32_t i = 0; i < half; ++i) {
      if (filled[i] && filled[i + half]) part[i] = combine(part[i], part[i + half]);
      if (!filled[i] && filled[i + half]) part[i] = part[i + half];
      filled[i] = filled[i] || filled[i + half];
    }
  }
  return part[0];
}
template <class T, class F>
AIR_UNCHECKED T scanned(const exchange<T>& all, uint32_t first, uint32_t count, T empty, F combine) {
  T sum = empty;
  bool begun = false;
  for (uint32_t i = first; i < first + count; ++i) {
    if (!all.takes_part(i)) continue;
    sum = begun ? combine(sum, all.slots[i]) : all.slots[i];
    begun = true;
  }
  return sum;
}

struct plus {
  template <class T>
  T operator()(T a, T b) const { return static_cast<T>(a + b); }
};
struct times {
  template <class T>
  T operator()(T a, T b) const { return static_cast<T>(a * b); }
};
struct least {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (is_real<T>) return air::fmin(a, b);
    else return air::min(a, b);
  }
};
struct most {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (is_real<T>) return air::fmax(a, b);
    else return air::max(a, b);
  }
};
struct bit_and {
  template <class T>
  T operator()(T a, T b) const { return a & b; }
};
struct bit_or {
  template <class T>
  T operator()(T a, T b) const { return a | b; }
};
struct bit_xor {
  template <class T>
  T operator()(T a, T b) const { return a ^ b; }
};

#define AIR_FOLD(name, F)                                                \
  template <class T>                                                     \
  AIR_FUNCTION SM_CONVERGENT T simd_##name(T x) {                        \
    return folded(exchange<T>(x), 0, 32, F());                           \
  }                                                                      \
  template <class T>                                                     \
  AIR_FUNCTION SM_CONVERGENT T quad_##name(T x) {                        \
    return folded(exchange<T>(x), lane() / 4 * 4, 4, F());               \
  }
AIR_FOLD(sum, plus)
AIR_FOLD(product, times)
AIR_FOLD(min, least)
AIR_FOLD(max, most)
AIR_FOLD(and, bit_and)
AIR_FOLD(or, bit_or)
AIR_FOLD(xor, bit_xor)
#undef AIR_FOLD

#define AIR_SCAN(name, F, empty)                                                                 \
  template <class T>                                                                             \
  AIR_FUNCTION SM_CONVERGENT T simd_prefix_inclusive_##name(T x) {                               \
    return scanned(exchange<T>(x), 0, lane() + 1, static_cast<T>(empty), F());                   \
  }                                                                                              \
  template <class T>                                                                             \
  AIR_FUNCTION SM_CONVERGENT T simd_prefix_exclusive_##name(T x) {                               \
    return scanned(exchange<T>(x), 0, lane(), static_cast<T>(empty), F());                       \
  }
AIR_SCAN(sum, plus, 0)
AIR_SCAN(product, times, 1)
#undef AIR_SCAN

// `me` is the index of the lane within a group of `width` lanes.
#define AIR_SHUFFLE(name, source)                                                    \
  template <class T>                                                                 \
  AIR_FUNCTION SM_CONVERGENT T simd_##name(T x, u16 by) {                            \
    const int me = static_cast<int>(lane()), width = 32, n = by;                     \
    (void)me, (void)width;                                                           \
    return exchange<T>(x).from(static_cast<uint32_t>(source));                       \
  }                                                                                  \
  template <class T>                                                                 \
  AIR_FUNCTION SM_CONVERGENT T quad_##name(T x, u16 by) {                            \
    const int me = static_cast<int>(lane() % 4), width = 4, n = by;                  \
    const uint32_t base = lane() / 4 * 4;                                            \
    (void)me, (void)width;                                                           \
    return exchange<T>(x).from(base + static_cast<uint32_t>((source) % 4));          \
  }
AIR_SHUFFLE(shuffle, n)
AIR_SHUFFLE(broadcast, n)
AIR_SHUFFLE(shuffle_xor, me ^ n)
AIR_SHUFFLE(shuffle_up, me < n ? me : me - n)
AIR_SHUFFLE(shuffle_down, me + n >= width ? me : me + n)
AIR_SHUFFLE(shuffle_rotate_up, (me + width - n % width) % width)
AIR_SHUFFLE(shuffle_rotate_down, (me + n) % width)
#undef AIR_SHUFFLE

template <class T>
AIR_FUNCTION SM_CONVERGENT T simd_broadcast_first(T x) {
  const exchange<T> all(x);
  return all.from(static_cast<uint32_t>(__builtin_ctz(all.active)));
}

template <class T>
struct pair {
  T data, fill;
};
// A run is `modulo` neighboring lanes. If the source lane is in the caller's run, the result is its data. Otherwise the
// result is the fill value of the lane at the source lane's place in the caller's run.
template <class T>
AIR_FUNCTION SM_CONVERGENT T simd_shuffle_and_fill_up(T data, T fill, u16 delta, u16 modulo) {
  const uint32_t me = lane(), place = me % modulo;
  exchange<pair<T>> all(pair<T>{data, fill});
  return place >= delta ? all.from(me - delta).data : all.from(me + modulo - delta).fill;
}
template <class T>
AIR_FUNCTION SM_CONVERGENT T simd_shuffle_and_fill_down(T data, T fill, u16 delta, u16 modulo) {
  const uint32_t me = lane(), place = me % modulo;
  exchange<pair<T>> all(pair<T>{data, fill});
  return place + delta < modulo ? all.from(me + delta).data : all.from(me + delta - modulo).fill;
}
AIR_FUNCTION SM_CONVERGENT bool simd_any(bool x) { return folded(exchange<u8>(x), 0, 32, bit_or()) != 0; }
AIR_FUNCTION SM_CONVERGENT bool simd_all(bool x) { return folded(exchange<u8>(x), 0, 32, bit_and()) != 0; }

// ---- matrices: lane l holds row 4*(l>>4) + ((l>>1)&3), columns 4*((l>>3)&1) + 2*(l&1) and the next ------------------

AIR_FUNCTION uint64_t matrix_row() { return (lane() >> 4) * 4 + (lane() >> 1) % 4; }
AIR_FUNCTION uint64_t matrix_column() { return (lane() >> 3) % 2 * 4 + lane() % 2 * 2; }

AIR_FUNCTION void note_matrix_access() {
#if __has_feature(thread_sanitizer)
  sm_note_matrix_access();
#endif
}
template <class E>
AIR_FUNCTION E* matrix_element(void* start, uint64_t stride, vector<u64, 2> origin, bool transpose, uint64_t i) {
  uint64_t row = matrix_row(), column = matrix_column() + i;
  if (transpose) {
    uint64_t other = row;
    row = column;
    column = other;
  }
  return static_cast<E*>(start) + (origin.y + row) * stride + origin.x + column;
}
template <class E>
AIR_FUNCTION vector<E, 2> matrix_load(void* start, uint64_t stride, vector<u64, 2> origin, bool transpose) {
  note_matrix_access();
  return {*matrix_element<E>(start, stride, origin, transpose, 0), *matrix_element<E>(start, stride, origin, transpose, 1)};
}
template <class E>
AIR_FUNCTION void matrix_store(vector<E, 2> m, void* start, uint64_t stride, vector<u64, 2> origin, bool transpose) {
  note_matrix_access();
  *matrix_element<E>(start, stride, origin, transpose, 0) = m.x;
  *matrix_element<E>(start, stride, origin, transpose, 1) = m.y;
}
template <class E>
AIR_FUNCTION vector<E, 2> matrix_diagonal(E value) {
  vector<E, 2> m = {E(0), E(0)};
  if (matrix_row() == matrix_column()) m.x = value;
  if (matrix_row() == matrix_column() + 1) m.y = value;
  return m;
}
template <class E>
constexpr uint32_t matrix_type = __is_same(E, f16) ? 0 : __is_same(E, bf16) ? 1 : 2;
template <class D, class A, class B, class C>
AIR_FUNCTION SM_CONVERGENT vector<D, 2> matrix_product(vector<A, 2> a, vector<B, 2> b, vector<C, 2> c) {
  vector<D, 2> d;
  sm_mma(&d, matrix_type<D>, &a, matrix_type<A>, &b, matrix_type<B>, &c, matrix_type<C>);
  sm_mma_sync_if(&d);
  return d;
}

}  // namespace air
