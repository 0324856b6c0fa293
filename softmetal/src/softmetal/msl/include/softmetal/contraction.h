// Contraction of vector expressions. msl/contraction.py changes `a * b + c` to `sm::fuse(a) * sm::fuse(b) + c`. The
// operator of the sum thus gets both factors and computes each element in one expression, which the compiler contracts
// as for scalars.
#pragma once

#include <softmetal/vector.h>
#include <metal_config>

namespace sm {

// One factor of a product that is an operand of a sum.
template <class V>
struct factor {
  V value;
};

// A product that is not yet rounded. It is used only as an operand of a sum.
template <class V>
struct product {
  V a, b;
  constexpr operator V() const { return a * b; }
};

template <class T>
METAL_FUNC constexpr T fuse(T x) {
  return x;
}
#define SM_FUSE(T)                                                   \
  template <int N>                                                   \
  METAL_FUNC constexpr factor<vec<T, N>> fuse(vec<T, N> x) {         \
    return {x};                                                      \
  }                                                                  \
  template <int N>                                                   \
  METAL_FUNC constexpr factor<vec<T, N>> fuse(packed<vec<T, N>> x) { \
    return {vec<T, N>(x)};                                           \
  }
SM_FUSE(float)
SM_FUSE(_Float16)
#undef SM_FUSE

template <class V>
METAL_FUNC constexpr product<V> operator*(factor<V> a, factor<V> b) {
  return {a.value, b.value};
}
template <class V, class S, class = enable_t<shape<S>::scalar>>
METAL_FUNC constexpr product<V> operator*(factor<V> a, S b) {
  return {a.value, V(b)};
}
template <class S, class V, class = enable_t<shape<S>::scalar>>
METAL_FUNC constexpr product<V> operator*(S a, factor<V> b) {
  return {V(a), b.value};
}
// The other factor is a matrix, or a type of the source with its own operators.
template <class V, class S, class = enable_t<!shape<S>::scalar>>
METAL_FUNC constexpr auto operator*(factor<V> a, const S& b) -> decltype(a.value * b) {
  return a.value * b;
}
template <class S, class V, class = enable_t<!shape<S>::scalar>>
METAL_FUNC constexpr auto operator*(const S& a, factor<V> b) -> decltype(a * b.value) {
  return a * b.value;
}

// A product with a sign remains a product, because clang also fuses -a * b + c.
template <class V>
METAL_FUNC constexpr product<V> operator-(product<V> p) {
  return {-p.a, p.b};
}
template <class V>
METAL_FUNC constexpr product<V> operator+(product<V> p) {
  return p;
}

#define SM_SUM(name, expression)                                  \
  template <class V>                                              \
  METAL_FUNC constexpr V name(product<V> p, V c) {                \
    V r{};                                                        \
    for (int i = 0; i < V::size; ++i)                             \
      r[i] = static_cast<typename shape<V>::element>(expression); \
    return r;                                                     \
  }
SM_SUM(product_plus, p.a[i] * p.b[i] + c[i])
SM_SUM(product_minus, p.a[i] * p.b[i] - c[i])
SM_SUM(minus_product, c[i] - p.a[i] * p.b[i])
#undef SM_SUM

// The types that can be added to a vector V.
template <class C, class V>
constexpr bool is_summand = shape<C>::scalar || __is_same(C, V) || __is_same(C, packed<V>);

template <class V>
METAL_FUNC constexpr V operator+(product<V> p, product<V> q) {
  return product_plus(p, V(q));
}
template <class V, class C, class = enable_t<is_summand<C, V>>>
METAL_FUNC constexpr V operator+(product<V> p, const C& c) {
  return product_plus(p, V(c));
}
template <class C, class V, class = enable_t<is_summand<C, V>>>
METAL_FUNC constexpr V operator+(const C& c, product<V> p) {
  return product_plus(p, V(c));
}
template <class V>
METAL_FUNC constexpr V operator-(product<V> p, product<V> q) {
  return product_minus(p, V(q));
}
template <class V, class C, class = enable_t<is_summand<C, V>>>
METAL_FUNC constexpr V operator-(product<V> p, const C& c) {
  return product_minus(p, V(c));
}
template <class C, class V, class = enable_t<is_summand<C, V>>>
METAL_FUNC constexpr V operator-(const C& c, product<V> p) {
  return minus_product(p, V(c));
}

}  // namespace sm
