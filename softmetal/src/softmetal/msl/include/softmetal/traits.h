// Type traits that the library and the check of types (msl/dialect) share. The file that includes this list first defines
// - SM_CONSTANT, which declares a constant, and declval;
// - sm_number<T>, with the element type of a number or vector, its width (1 for a number) and whether it is a vector;
// - SM_IS_FLOATING(T) and SM_IS_SCALAR(T), because in the library bfloat is a class.
// After the include, it defines decay.

template <class T, T v>
struct integral_constant {
  static SM_CONSTANT T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
struct type_identity {
  typedef T type;
};
template <class T>
struct remove_const : type_identity<T> {};
template <class T>
struct remove_const<const T> : type_identity<T> {};
template <class T>
struct remove_volatile : type_identity<T> {};
template <class T>
struct remove_volatile<volatile T> : type_identity<T> {};
template <class T>
struct remove_cv : remove_const<typename remove_volatile<T>::type> {};
template <class T>
struct remove_reference : type_identity<T> {};
template <class T>
struct remove_reference<T&> : type_identity<T> {};
template <class T>
struct remove_reference<T&&> : type_identity<T> {};
template <class T>
struct remove_addrspace : type_identity<T> {};
template <class T>
struct remove_pointer : type_identity<__remove_pointer(T)> {};
template <class T>
struct remove_extent : type_identity<__remove_extent(T)> {};
template <class T>
struct remove_cvref : remove_cv<typename remove_reference<T>::type> {};
template <class T>
struct decay;
template <class T>
struct add_const : type_identity<const T> {};
template <class T>
struct underlying_type : type_identity<__underlying_type(T)> {};
template <class T>
struct make_signed;
template <class T>
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

#define SM_ALIAS(name) \
  template <class T>   \
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
SM_ALIAS(make_signed)
SM_ALIAS(make_unsigned)
#undef SM_ALIAS

#define SM_TRAIT(name, ...)                          \
  template <class T>                                 \
  struct name : bool_constant<bool(__VA_ARGS__)> {}; \
  template <class T>                                 \
  SM_CONSTANT bool name##_v = name<T>::value;
#define SM_ELEMENT typename sm_number<typename remove_cv<T>::type>::element
SM_TRAIT(is_integral, __is_integral(SM_ELEMENT))
SM_TRAIT(is_floating_point, SM_IS_FLOATING(SM_ELEMENT))
SM_TRAIT(is_arithmetic, SM_IS_FLOATING(SM_ELEMENT) || __is_integral(SM_ELEMENT))
SM_TRAIT(is_signed, SM_IS_FLOATING(SM_ELEMENT) || __is_signed(SM_ELEMENT))
SM_TRAIT(is_unsigned, __is_unsigned(SM_ELEMENT))
SM_TRAIT(is_scalar, SM_IS_SCALAR(T))
SM_TRAIT(is_vector, sm_number<typename remove_cv<T>::type>::is_vector)
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
#undef SM_ELEMENT
#undef SM_TRAIT
#undef SM_IS_FLOATING
#undef SM_IS_SCALAR

#define SM_TRAIT_2(name, ...)                        \
  template <class T, class U>                        \
  struct name : bool_constant<bool(__VA_ARGS__)> {}; \
  template <class T, class U>                        \
  SM_CONSTANT bool name##_v = name<T, U>::value;
SM_TRAIT_2(is_same, __is_same(T, U))
SM_TRAIT_2(is_convertible, __is_convertible(T, U))
SM_TRAIT_2(is_base_of, __is_base_of(T, U))
#undef SM_TRAIT_2
template <class T, class... A>
struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <class T, class... A>
SM_CONSTANT bool is_constructible_v = is_constructible<T, A...>::value;

template <class...>
struct conjunction : true_type {};
template <class A, class... B>
struct conjunction<A, B...> : conditional_t<bool(A::value), conjunction<B...>, false_type> {};
template <class...>
struct disjunction : false_type {};
template <class A, class... B>
struct disjunction<A, B...> : conditional_t<bool(A::value), true_type, disjunction<B...>> {};
template <class A>
struct negation : bool_constant<!bool(A::value)> {};
template <class... A>
SM_CONSTANT bool conjunction_v = conjunction<A...>::value;
template <class... A>
SM_CONSTANT bool disjunction_v = disjunction<A...>::value;
template <class A>
SM_CONSTANT bool negation_v = negation<A>::value;
// Internal names of Metal's own library that other projects use.
template <class... A>
using _disjunction = disjunction<A...>;
template <class... A>
using _conjunction = conjunction<A...>;
template <class A>
using _negation = negation<A>;
template <class T>
struct vec_elements : integral_constant<int, sm_number<typename remove_cv<T>::type>::width> {};

template <class... T>
struct common_type;
template <class T>
struct common_type<T> : decay<T> {};
template <class A, class B>
struct common_type<A, B> : decay<decltype(true ? declval<A>() : declval<B>())> {};
template <class A, class B, class... C>
struct common_type<A, B, C...> : common_type<typename common_type<A, B>::type, C...> {};
template <class... T>
using common_type_t = typename common_type<T...>::type;
template <class F, class... A>
struct result_of;
template <class F, class... A>
struct result_of<F(A...)> : type_identity<decltype(declval<F>()(declval<A>()...))> {};
template <class F>
using result_of_t = typename result_of<F>::type;
