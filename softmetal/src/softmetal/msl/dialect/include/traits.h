// Type traits, numeric_limits and array.
#pragma once

namespace metal {

// The type F of a template parameter that is a function. Without this alias, the dialect would add an address space.
template <typename F>
struct sm_function_of {
  typedef F type;
};
template <typename F>
using sm_function = typename sm_function_of<F>::type;

template <typename T, T v>
struct integral_constant {
  static const __constant constexpr T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
template <bool v>
using bool_constant = integral_constant<bool, v>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <bool c, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool c, typename T = void>
using enable_if_t = typename enable_if<c, T>::type;
template <bool c, typename A, typename B>
struct conditional {
  typedef A type;
};
template <typename A, typename B>
struct conditional<false, A, B> {
  typedef B type;
};
template <bool c, typename A, typename B>
using conditional_t = typename conditional<c, A, B>::type;

template <typename T>
struct type_identity {
  typedef T type;
};
template <typename T>
struct remove_const : type_identity<T> {};
template <typename T>
struct remove_const<const T> : type_identity<T> {};
template <typename T>
struct remove_volatile : type_identity<T> {};
template <typename T>
struct remove_volatile<volatile T> : type_identity<T> {};
template <typename T>
struct remove_cv : type_identity<typename remove_volatile<typename remove_const<T>::type>::type> {};
template <typename T>
struct remove_reference : type_identity<T> {};
template <typename T>
struct remove_reference<T&> : type_identity<T> {};
template <typename T>
struct remove_reference<T&&> : type_identity<T> {};
template <typename T>
struct remove_addrspace : type_identity<T> {};
// In the dialect, the type behind a reference includes an address space. Metal's traits return the type without it.
#define SM_REMOVE(space)                                               \
  template <typename T>                                                \
  struct remove_reference<space T&> : type_identity<T> {};             \
  template <typename T>                                                \
  struct remove_reference<const space T&> : type_identity<const T> {}; \
  template <typename T>                                                \
  struct remove_addrspace<space T> : type_identity<T> {};              \
  template <typename T>                                                \
  struct remove_addrspace<const space T> : type_identity<const T> {};
SM_REMOVE(__private)
SM_REMOVE(__global)
SM_REMOVE(__local)
SM_REMOVE(__constant)
#undef SM_REMOVE
template <typename T>
struct remove_pointer : type_identity<__remove_pointer(T)> {};
template <typename T>
struct remove_extent : type_identity<__remove_extent(T)> {};
template <typename T>
struct remove_cvref : type_identity<typename remove_cv<typename remove_reference<T>::type>::type> {};
template <typename T>
struct decay : remove_cvref<T> {};
template <typename T>
struct add_const : type_identity<const T> {};
template <typename T>
struct underlying_type : type_identity<__underlying_type(T)> {};
#define SM_ALIAS(name)  \
  template <typename T> \
  using name##_t = typename name<T>::type;
SM_ALIAS(type_identity)
SM_ALIAS(remove_const)
SM_ALIAS(remove_volatile)
SM_ALIAS(remove_cv)
SM_ALIAS(remove_reference)
SM_ALIAS(remove_addrspace)
SM_ALIAS(remove_pointer)
SM_ALIAS(remove_extent)
SM_ALIAS(remove_cvref)
SM_ALIAS(decay)
SM_ALIAS(add_const)
SM_ALIAS(underlying_type)
template <typename T>
struct make_signed;
template <typename T>
struct make_unsigned;
#define SM_SIGNEDNESS(S, U)                      \
  template <>                                    \
  struct make_signed<S> : type_identity<S> {};   \
  template <>                                    \
  struct make_signed<U> : type_identity<S> {};   \
  template <>                                    \
  struct make_unsigned<S> : type_identity<U> {}; \
  template <>                                    \
  struct make_unsigned<U> : type_identity<U> {};
SM_SIGNEDNESS(char, uchar)
SM_SIGNEDNESS(short, ushort)
SM_SIGNEDNESS(int, uint)
SM_SIGNEDNESS(long, ulong)
#undef SM_SIGNEDNESS
SM_ALIAS(make_signed)
SM_ALIAS(make_unsigned)
#undef SM_ALIAS

template <typename T>
struct sm_vector : false_type {
  typedef T element;
  enum { width = 1 };
};
template <typename T, int N>
struct sm_vector<vec<T, N>> : true_type {
  typedef T element;
  enum { width = N };
};
#define SM_ELEMENT typename sm_vector<typename remove_cv<T>::type>::element
#define SM_TRAIT(name, ...)                          \
  template <typename T>                              \
  struct name : bool_constant<bool(__VA_ARGS__)> {}; \
  template <typename T>                              \
  const __constant constexpr bool name##_v = name<T>::value;
SM_TRAIT(is_integral, __is_integral(SM_ELEMENT))
SM_TRAIT(is_floating_point, __is_floating_point(SM_ELEMENT))
SM_TRAIT(is_arithmetic, __is_arithmetic(SM_ELEMENT))
SM_TRAIT(is_signed, __is_floating_point(SM_ELEMENT) || __is_signed(SM_ELEMENT))
SM_TRAIT(is_unsigned, __is_unsigned(SM_ELEMENT))
SM_TRAIT(is_scalar, __is_arithmetic(T) || __is_pointer(T) || __is_enum(T))
SM_TRAIT(is_vector, sm_vector<typename remove_cv<T>::type>::value)
SM_TRAIT(is_void, __is_void(T))
SM_TRAIT(is_pointer, __is_pointer(T))
SM_TRAIT(is_array, __is_array(T))
SM_TRAIT(is_enum, __is_enum(T))
SM_TRAIT(is_class, __is_class(T))
SM_TRAIT(is_union, __is_union(T))
SM_TRAIT(is_function, __is_function(T))
SM_TRAIT(is_const, __is_const(T))
SM_TRAIT(is_volatile, __is_volatile(T))
SM_TRAIT(is_reference, __is_reference(T))
SM_TRAIT(is_lvalue_reference, __is_lvalue_reference(T))
SM_TRAIT(is_rvalue_reference, __is_rvalue_reference(T))
SM_TRAIT(is_trivial, __is_trivial(T))
SM_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
SM_TRAIT(is_standard_layout, __is_standard_layout(T))
#undef SM_TRAIT
#undef SM_ELEMENT
#define SM_TRAIT_2(name, ...)                        \
  template <typename A, typename B>                  \
  struct name : bool_constant<bool(__VA_ARGS__)> {}; \
  template <typename A, typename B>                  \
  const __constant constexpr bool name##_v = name<A, B>::value;
SM_TRAIT_2(is_same, __is_same(A, B))
SM_TRAIT_2(is_convertible, __is_convertible_to(A, B))
SM_TRAIT_2(is_base_of, __is_base_of(A, B))
#undef SM_TRAIT_2
template <typename T, typename... A>
struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <typename T, typename... A>
const __constant constexpr bool is_constructible_v = __is_constructible(T, A...);

template <typename...>
struct conjunction : true_type {};
template <typename A, typename... B>
struct conjunction<A, B...> : conditional_t<bool(A::value), conjunction<B...>, false_type> {};
template <typename...>
struct disjunction : false_type {};
template <typename A, typename... B>
struct disjunction<A, B...> : conditional_t<bool(A::value), true_type, disjunction<B...>> {};
template <typename A>
struct negation : bool_constant<!bool(A::value)> {};
template <typename... A>
const __constant constexpr bool conjunction_v = conjunction<A...>::value;
template <typename... A>
const __constant constexpr bool disjunction_v = disjunction<A...>::value;
template <typename A>
const __constant constexpr bool negation_v = negation<A>::value;
// Internal names of Metal's own library that other projects use.
template <typename... A>
using _disjunction = disjunction<A...>;
template <typename... A>
using _conjunction = conjunction<A...>;
template <typename A>
using _negation = negation<A>;

template <typename T>
struct vec_elements : integral_constant<int, sm_vector<typename remove_cv<T>::type>::width> {};
template <typename T>
T declval();
template <typename... T>
struct common_type;
template <typename A>
struct common_type<A> : decay<A> {};
template <typename A, typename B>
struct common_type<A, B> : decay<decltype(true ? declval<A>() : declval<B>())> {};
template <typename A, typename B, typename... C>
struct common_type<A, B, C...> : common_type<typename common_type<A, B>::type, C...> {};
template <typename... T>
using common_type_t = typename common_type<T...>::type;
template <typename F, typename... A>
struct result_of;
template <typename F, typename... A>
struct result_of<F(A...)> : type_identity<decltype(declval<F>()(declval<A>()...))> {};
template <typename F>
using result_of_t = typename result_of<F>::type;

template <typename T>
struct _numeric_limits_impl {
  static const __constant constexpr bool is_specialized = false;
};
template <typename T>
struct numeric_limits : _numeric_limits_impl<T> {};
#define SM_LIMITS(T)                                                               \
  template <>                                                                      \
  struct _numeric_limits_impl<T> {                                                 \
    static const __constant constexpr bool is_specialized = true;                  \
    static const __constant constexpr bool is_signed = T(-1) < T(0);               \
    static const __constant constexpr bool is_integer = __is_integral(T);          \
    static const __constant constexpr bool is_exact = __is_integral(T);            \
    static const __constant constexpr bool has_infinity = __is_floating_point(T);  \
    static const __constant constexpr bool has_quiet_NaN = __is_floating_point(T); \
    static const __constant constexpr int radix = 2;                               \
    static const __constant constexpr int digits = 8 * sizeof(T);                  \
    static const __constant constexpr int digits10 = 2 * sizeof(T);                \
    static const __constant constexpr int max_exponent = 128;                      \
    static const __constant constexpr int min_exponent = -125;                     \
    static constexpr T min() {                                                     \
      return T(0);                                                                 \
    }                                                                              \
    static constexpr T max() {                                                     \
      return T(1);                                                                 \
    }                                                                              \
    static constexpr T lowest() {                                                  \
      return T(0);                                                                 \
    }                                                                              \
    static constexpr T epsilon() {                                                 \
      return T(0);                                                                 \
    }                                                                              \
    static constexpr T round_error() {                                             \
      return T(0);                                                                 \
    }                                                                              \
    static constexpr T infinity() {                                                \
      return T(0);                                                                 \
    }                                                                              \
    static constexpr T quiet_NaN() {                                               \
      return T(0);                                                                 \
    }                                                                              \
    static constexpr T signaling_NaN() {                                           \
      return T(0);                                                                 \
    }                                                                              \
    static constexpr T denorm_min() {                                              \
      return T(0);                                                                 \
    }                                                                              \
  };
SM_FLOATS(SM_LIMITS)
SM_INTEGERS(SM_LIMITS)
SM_LIMITS(bool)
#undef SM_LIMITS

template <typename T, size_t N>
struct array {
  T sm_elements[N];
  constexpr size_t size() const { return N; }
#define SM_ELEMENT(space)                                                              \
  constexpr space T& operator[](size_t i) space { return sm_elements[i]; }             \
  constexpr const space T& operator[](size_t i) const space { return sm_elements[i]; } \
  constexpr space T* data() space { return sm_elements; }
  SM_ELEMENT(__private)
  SM_ELEMENT(__global)
  SM_ELEMENT(__local)
#undef SM_ELEMENT
  constexpr const __constant T& operator[](size_t i) const __constant { return sm_elements[i]; }
};

template <typename T>
using uniform = T;
template <typename T>
constexpr T make_uniform(T x) {
  return x;
}

}  // namespace metal
