// Applies a scalar function to scalars, vectors and packed vectors, in any combination that Metal accepts. All vectors
// of a call must have one element type and one size. A scalar beside a vector is converted to the vector's element type
// and repeated.
#pragma once

#include <metal_type_traits>

namespace sm {

using metal::conditional_t;

// Scalar operand types. For an unscoped enumeration, this is its integer type.
template <class T, bool is_enum = __is_enum(T)>
struct plain {
  using type = T;
};
template <class T>
struct plain<T, true> {
  using type = decltype(+T());
};

template <class A, class B>
struct common_scalar {
  using type = decltype(A() + B());
};
template <class A>
struct common_scalar<A, A> {
  using type = A;
};
struct mismatch {};  // no common type

// Operand<element, size> is the common type of a list of arguments.
template <class T, int N>
struct operand {
  using element = T;
  static constexpr int size = N;
};
template <class A>
using operand_of = operand<typename plain<typename shape<metal::remove_cvref_t<A>>::element>::type,
                           shape<metal::remove_cvref_t<A>>::size>;

template <class P, class Q>
struct join {
  using type = mismatch;
};
template <class T, class U>
struct join<operand<T, 0>, operand<U, 0>> {
  using type = operand<typename common_scalar<T, U>::type, 0>;
};
template <class T, int N, class U>
struct join<operand<T, N>, operand<U, 0>> {
  using type = operand<T, N>;
};
template <class T, class U, int N>
struct join<operand<T, 0>, operand<U, N>> {
  using type = operand<U, N>;
};
template <class T, int N>
struct join<operand<T, N>, operand<T, N>> {
  using type = operand<T, N>;
};
template <>
struct join<operand<bool, 0>, operand<bool, 0>> {
  using type = operand<bool, 0>;
};
template <class T>
struct join<operand<T, 0>, operand<T, 0>> {
  using type = operand<T, 0>;
};

template <class P, class... A>
struct join_all {
  using type = P;
};
template <class P, class A, class... B>
struct join_all<P, A, B...> : join_all<typename join<P, operand_of<A>>::type, B...> {};

template <bool numeric, class... A>
struct joined_if {};
template <class A, class... B>
struct joined_if<true, A, B...> {
  using type = typename join_all<operand_of<A>, B...>::type;
};
template <class... A>
using joined = typename joined_if<all_numeric<metal::remove_cvref_t<A>...>(), A...>::type;

// float_of is the type in which a floating-point function of T computes. For bfloat it is float, because Metal has no
// bfloat math.
template <class T>
struct float_of {
  using type = float;
};
template <>
struct float_of<half> {
  using type = half;
};

template <class T, int N>
struct sized {
  using type = vec<T, N>;
};
template <class T>
struct sized<T, 0> {
  using type = T;
};
template <class T, int N>
using sized_t = typename sized<T, N>::type;

template <class S, class A>
constexpr S at(const A& a, int, index<0>) {
  return static_cast<S>(a);
}
template <class S, class A, int N>
constexpr S at(const A& a, int i, index<N>) {
  return static_cast<S>(a[i]);
}

// Applies the function F to each of N elements. F takes scalars of type S and returns a scalar of type R.
template <class F, class S, class R, int N>
struct mapper {
  template <class... A>
  METAL_FUNC static constexpr vec<R, N> run(const A&... a) {
    vec<R, N> r{};
    for (int i = 0; i < N; ++i) r[i] = F::of(at<S>(a, i, index<shape<A>::size>())...);
    return r;
  }
};
template <class F, class S, class R>
struct mapper<F, S, R, 0> {
  template <class... A>
  METAL_FUNC static constexpr R run(const A&... a) {
    return F::of(static_cast<S>(a)...);
  }
};

// The rules that map element types to the function's operand and result types.
struct keeps {
  template <class T>
  struct in { using type = T; };
  template <class T>
  struct out { using type = T; };
};
struct floats {
  template <class T>
  using in = float_of<T>;
  template <class T>
  using out = float_of<T>;
};
struct singles {
  template <class T>
  struct in { using type = float; };
  template <class T>
  struct out { using type = float; };
};
struct tests {  // bool of a floating-point argument
  template <class T>
  struct in { using type = conditional_t<metal::is_floating_point_v<T>, T, float>; };
  template <class T>
  struct out { using type = bool; };
};
struct counts {  // int of a floating-point argument
  template <class T>
  using in = float_of<T>;
  template <class T>
  struct out { using type = int; };
};

template <class Rule, class J>
struct result {};
template <class Rule, class T, int N>
struct result<Rule, operand<T, N>> {
  using in = typename Rule::template in<T>::type;
  using out = typename Rule::template out<T>::type;
  static constexpr int size = N;
  using type = sized_t<out, N>;
};

template <class Rule, class... A>
using result_t = typename result<Rule, joined<A...>>::type;

template <class F, class Rule, class... A>
METAL_FUNC constexpr result_t<Rule, A...> apply(const A&... a) {
  using R = result<Rule, joined<A...>>;
  return mapper<F, typename R::in, typename R::out, R::size>::run(a...);
}

}  // namespace sm

// Defines a library function of 1, 2 or 3 arguments, which applies the functor F. `Rule` determines the types.
#define SM_FUNCTION_1(name, F, Rule)                                     \
  template <class A>                                                     \
  METAL_FUNC constexpr ::sm::result_t<::sm::Rule, A> name(A a) {         \
    return ::sm::apply<F, ::sm::Rule>(a);                                \
  }
#define SM_FUNCTION_2(name, F, Rule)                                     \
  template <class A, class B>                                            \
  METAL_FUNC constexpr ::sm::result_t<::sm::Rule, A, B> name(A a, B b) { \
    return ::sm::apply<F, ::sm::Rule>(a, b);                             \
  }
#define SM_FUNCTION_3(name, F, Rule)                                              \
  template <class A, class B, class C>                                            \
  METAL_FUNC constexpr ::sm::result_t<::sm::Rule, A, B, C> name(A a, B b, C c) {  \
    return ::sm::apply<F, ::sm::Rule>(a, b, c);                                   \
  }
