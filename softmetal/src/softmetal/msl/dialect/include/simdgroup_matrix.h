// Matrices that are spread over a simdgroup: 8 x 8, of floating-point numbers.
#pragma once

namespace metal {

template <typename T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix exists for 8x8 only");
  static_assert(__is_floating_point(T), "simdgroup_matrix exists for half, bfloat and float only");
  typedef vec<T, 2> storage_type;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  __private storage_type& thread_elements() __private;
  const __private storage_type& thread_elements() const __private;
  storage_type sm_elements;
};
typedef simdgroup_matrix<half, 8> simdgroup_half8x8;
typedef simdgroup_matrix<float, 8> simdgroup_float8x8;
#if SM_METAL_VERSION >= 310
typedef simdgroup_matrix<bfloat, 8> simdgroup_bfloat8x8;
#endif
template <typename T, int C, int R = C>
simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
template <typename T, int C, int R = C>
simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T);

#define SM_MEMORY(space)                                                                                   \
  template <typename T, int C, int R>                                                                      \
  void simdgroup_load(__private simdgroup_matrix<T, C, R>&, const space T*, ulong = C, ulong2 = ulong2(0), \
                      bool = false);                                                                       \
  template <typename T, int C, int R>                                                                      \
  void simdgroup_store(simdgroup_matrix<T, C, R>, space T*, ulong = C, ulong2 = ulong2(0), bool = false);
SM_MEMORY(__global)
SM_MEMORY(__local)
#undef SM_MEMORY
template <typename D, typename A, typename B, typename C, int N>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, N, N>&, simdgroup_matrix<A, N, N>,
                                   simdgroup_matrix<B, N, N>, simdgroup_matrix<C, N, N>);
template <typename D, typename A, typename B, int N>
void simdgroup_multiply(__private simdgroup_matrix<D, N, N>&, simdgroup_matrix<A, N, N>, simdgroup_matrix<B, N, N>);
template <typename A, typename B, int N>
simdgroup_matrix<A, N, N> operator*(simdgroup_matrix<A, N, N>, simdgroup_matrix<B, N, N>);

}  // namespace metal
