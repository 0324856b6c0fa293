// The fp32 kernels of the mLSTM. Every function is a template of a vector policy V (vec_*.h), so the code of different
// instruction sets never shares a symbol.
#pragma once

#include <algorithm>

#include "csrc/cpu/unroll.h"
#include "csrc/cpu/vector_math.h"
#include "csrc/mlstm/cpu/kernel_table.h"

namespace marlin::cpu {

// Returns log(1 + y) = 2 artanh(y / (2 + y)) for y in [0, 1], by the power series of artanh. The argument of artanh is
// at most 1/3.
template <class V>
[[gnu::always_inline]] inline typename V::F log1p_vector(typename V::F y) {
  using F = typename V::F;
  const F z = V::div(y, V::add(y, V::set1(2.F)));
  return V::mul(
      z, polynomial<V>(V::mul(z, z), 2.F / 17, 2.F / 15, 2.F / 13, 2.F / 11, 2.F / 9, 2.F / 7, 2.F / 5, 2.F / 3, 2.F));
}

template <class V, int R, int C, bool causal>
void mlstm_product(const MlstmProduct& product) {
  using F = typename V::F;
  // a local copy, because the compiler knows that no store to a float can change it
  const MlstmProduct p = product;
  F acc[R * C];
  if (p.beta == 0.F) {
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) { acc[i] = V::zero(); });
  } else {
    const F beta = V::set1(p.beta);
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) {
      acc[i] = V::mul(beta, V::load(p.out + i / C * p.ld_out + i % C * V::width));
    });
  }
  const float* a = p.a;
  const float* b = p.b;
  for (int64_t k = 0; k < p.k; ++k, a += p.a_k, b += p.ld_b) {
    F column[C];
    unroll<V, C>([&](auto c) __attribute__((always_inline)) { column[c] = V::load(b + c * V::width); });
    unroll<V, R>([&](auto i) __attribute__((always_inline)) {
      const F value = V::set1(a[i * p.a_row]);
      unroll<V, C>([&](auto c)
                       __attribute__((always_inline)) { acc[i * C + c] = V::fma(column[c], value, acc[i * C + c]); });
    });
  }
  if constexpr (causal) {
    unroll<V, R>([&](auto k) __attribute__((always_inline)) {
      F column[C];
      unroll<V, C>([&](auto c) __attribute__((always_inline)) { column[c] = V::load(b + c * V::width); });
      unroll<V, R - k>([&](auto below) __attribute__((always_inline)) {
        constexpr int i = k + below;
        const F value = V::set1(a[i * p.a_row]);
        unroll<V, C>([&](auto c)
                         __attribute__((always_inline)) { acc[i * C + c] = V::fma(column[c], value, acc[i * C + c]); });
      });
      a += p.a_k;
      b += p.ld_b;
    });
  }
  unroll<V, R * C>(
      [&](auto i) __attribute__((always_inline)) { V::store(p.out + i / C * p.ld_out + i % C * V::width, acc[i]); });
}

template <class V>
float horizontal_sum(typename V::F values) {
  float lanes[V::width];
  V::store(lanes, values);
  float sum = 0.F;
  for (float lane : lanes)
    sum += lane;
  return sum;
}

template <class V>
float mlstm_weigh(float* p, const float* high, const float* low, float row_high, float row_low, float scale,
                  int64_t count) {
  using F = typename V::F;
  F sum = V::zero();
  const F rh = V::set1(row_high);
  const F rl = V::set1(row_low);
  const F factor = V::set1(scale);
  auto weighted = [&](int64_t l) __attribute__((always_inline)) {
    const F exponent = V::add(V::add(rh, V::load(high + l)), V::add(rl, V::load(low + l)));
    const F value = V::mul(V::mul(V::load(p + l), factor), exp_vector<V>(exponent));
    V::store(p + l, value);
    return value;
  };
  int64_t l = 0;
  for (; l + V::width <= count; l += V::width)
    sum = V::add(sum, weighted(l));
  float total = horizontal_sum<V>(sum);
  if (l < count) {
    weighted(l);
    for (; l < count; ++l)
      total += p[l];
  }
  return total;
}

template <class V>
float mlstm_scale_and_dot(float* x, float scale, const float* n, int64_t count) {
  using F = typename V::F;
  F sum = V::zero();
  const F factor = V::set1(scale);
  int64_t d = 0;
  for (; d + V::width <= count; d += V::width) {
    const F value = V::mul(V::load(x + d), factor);
    V::store(x + d, value);
    sum = V::fma(value, V::load(n + d), sum);
  }
  float total = horizontal_sum<V>(sum);
  for (; d < count; ++d) {
    x[d] *= scale;
    total += x[d] * n[d];
  }
  return total;
}

template <class V>
void mlstm_scale(float* x, float scale, int64_t count) {
  const auto factor = V::set1(scale);
  int64_t d = 0;
  for (; d + V::width <= count; d += V::width)
    V::store(x + d, V::mul(V::load(x + d), factor));
  for (; d < count; ++d)
    x[d] *= scale;
}

template <class V>
void mlstm_multiply(float* x, const float* weights, int64_t count) {
  int64_t l = 0;
  for (; l + V::width <= count; l += V::width)
    V::store(x + l, V::mul(V::load(x + l), V::load(weights + l)));
  for (; l < count; ++l)
    x[l] *= weights[l];
}

template <class V>
void mlstm_exp(float* x, int64_t count) {
  for (int64_t l = 0; l < count; l += V::width)
    V::store(x + l, exp_vector<V>(V::load(x + l)));
}

template <class V>
void mlstm_softplus(const float* f, float* out, int64_t count) {
  for (int64_t l = 0; l < count; l += V::width) {
    const auto x = V::load(f + l);
    const auto size = V::max(V::sub(V::zero(), x), x);
    V::store(out + l, log1p_vector<V>(exp_vector<V>(V::sub(V::zero(), size))));
  }
}

template <class V>
void mlstm_step_row(const float* from, float* to, const float* v, float* numerator, float forget, float key,
                    float query, int64_t count) {
  const auto f = V::set1(forget);
  const auto k = V::set1(key);
  const auto q = V::set1(query);
  int64_t d = 0;
  for (; d + V::width <= count; d += V::width) {
    const auto value = V::fma(f, V::load(from + d), V::mul(k, V::load(v + d)));
    V::store(to + d, value);
    V::store(numerator + d, V::fma(q, value, V::load(numerator + d)));
  }
  for (; d < count; ++d) {
    to[d] = forget * from[d] + key * v[d];
    numerator[d] += query * to[d];
  }
}

template <class V>
constexpr MlstmKernels mlstm_kernels() {
  constexpr int C = V::large_m_vectors;
  static_assert(V::large_m_rows <= kMaxMlstmRows && kMlstmPadding % V::width == 0);
  MlstmKernels kernels{};
  kernels.strip = C * V::width;
  kernels.max_rows = V::large_m_rows;
  [&]<int... i>(std::integer_sequence<int, i...>) {
    ((kernels.product[static_cast<size_t>(i + 1)] = &mlstm_product<V, i + 1, C, false>), ...);
    ((kernels.causal_product[static_cast<size_t>(i + 1)] = &mlstm_product<V, i + 1, C, true>), ...);
  }(std::make_integer_sequence<int, V::large_m_rows>{});
  kernels.weigh = &mlstm_weigh<V>;
  kernels.scale = &mlstm_scale<V>;
  kernels.multiply = &mlstm_multiply<V>;
  kernels.scale_and_dot = &mlstm_scale_and_dot<V>;
  kernels.exp = &mlstm_exp<V>;
  kernels.softplus = &mlstm_softplus<V>;
  kernels.step_row = &mlstm_step_row<V>;
  return kernels;
}

}  // namespace marlin::cpu

// Defines a function that returns the kernels for the vector policy V.
#define MARLIN_MLSTM_KERNELS(function, V)                        \
  namespace marlin::cpu {                                        \
  const MlstmKernels* function() {                               \
    static constexpr MlstmKernels kKernels = mlstm_kernels<V>(); \
    return &kKernels;                                            \
  }                                                              \
  }
