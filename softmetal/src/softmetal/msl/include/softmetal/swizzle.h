// The swizzles of vec<T, N> as properties: `v.zx = w` is `v.put_zx(w)`, `v.zx` is `v.get_zx()`. The rgba names share
// the accessors of the xyzw names. A swizzle in which a letter occurs twice is read-only.
#pragma once

namespace sm {

// Returns whether no letter occurs twice. The parameter T only delays the evaluation until the setter is used.
template <class T>
constexpr bool distinct_letters(const char* letters) {
  for (int i = 0; letters[i]; ++i)
    for (int j = 0; j < i; ++j)
      if (letters[i] == letters[j]) return false;
  return true;
}

}  // namespace sm

#define SM_ASSIGNABLE(letters) static_assert(::sm::distinct_letters<T>(letters), "vector swizzle is not assignable: " letters)

#define SM_SWIZZLE_1(a, ra)                                        \
  constexpr T get_##a() const { return a; }                        \
  constexpr void put_##a(T value) { a = value; }                   \
  __declspec(property(get = get_##a, put = put_##a)) T ra;

#define SM_SWIZZLE_2(a, ra, b, rb)                                                \
  constexpr vec<T, 2> get_##a##b() const { return vec<T, 2>(a, b); }              \
  constexpr void put_##a##b(vec<T, 2> value) {                                    \
    SM_ASSIGNABLE(#a #b);                                                         \
    a = value.x, b = value.y;                                                     \
  }                                                                               \
  __declspec(property(get = get_##a##b, put = put_##a##b)) vec<T, 2> a##b;        \
  __declspec(property(get = get_##a##b, put = put_##a##b)) vec<T, 2> ra##rb;

#define SM_SWIZZLE_3(a, ra, b, rb, c, rc)                                                \
  constexpr vec<T, 3> get_##a##b##c() const { return vec<T, 3>(a, b, c); }               \
  constexpr void put_##a##b##c(vec<T, 3> value) {                                        \
    SM_ASSIGNABLE(#a #b #c);                                                             \
    a = value.x, b = value.y, c = value.z;                                               \
  }                                                                                      \
  __declspec(property(get = get_##a##b##c, put = put_##a##b##c)) vec<T, 3> a##b##c;      \
  __declspec(property(get = get_##a##b##c, put = put_##a##b##c)) vec<T, 3> ra##rb##rc;

#define SM_SWIZZLE_4(a, ra, b, rb, c, rc, d, rd)                                                    \
  constexpr vec<T, 4> get_##a##b##c##d() const { return vec<T, 4>(a, b, c, d); }                    \
  constexpr void put_##a##b##c##d(vec<T, 4> value) {                                                \
    SM_ASSIGNABLE(#a #b #c #d);                                                                     \
    a = value.x, b = value.y, c = value.z, d = value.w;                                             \
  }                                                                                                 \
  __declspec(property(get = get_##a##b##c##d, put = put_##a##b##c##d)) vec<T, 4> a##b##c##d;        \
  __declspec(property(get = get_##a##b##c##d, put = put_##a##b##c##d)) vec<T, 4> ra##rb##rc##rd;

// A macro does not expand inside its own expansion, so each nesting depth has its own copy of the list.
#define SM_EACH_OF_2_A(M) M(x, r) M(y, g)
#define SM_EACH_OF_2_B(M, ...) M(__VA_ARGS__, x, r) M(__VA_ARGS__, y, g)
#define SM_EACH_OF_2_C(M, ...) M(__VA_ARGS__, x, r) M(__VA_ARGS__, y, g)
#define SM_EACH_OF_2_D(M, ...) M(__VA_ARGS__, x, r) M(__VA_ARGS__, y, g)
#define SM_EACH_OF_3_A(M) SM_EACH_OF_2_A(M) M(z, b)
#define SM_EACH_OF_3_B(M, ...) SM_EACH_OF_2_B(M, __VA_ARGS__) M(__VA_ARGS__, z, b)
#define SM_EACH_OF_3_C(M, ...) SM_EACH_OF_2_C(M, __VA_ARGS__) M(__VA_ARGS__, z, b)
#define SM_EACH_OF_3_D(M, ...) SM_EACH_OF_2_D(M, __VA_ARGS__) M(__VA_ARGS__, z, b)
#define SM_EACH_OF_4_A(M) SM_EACH_OF_3_A(M) M(w, a)
#define SM_EACH_OF_4_B(M, ...) SM_EACH_OF_3_B(M, __VA_ARGS__) M(__VA_ARGS__, w, a)
#define SM_EACH_OF_4_C(M, ...) SM_EACH_OF_3_C(M, __VA_ARGS__) M(__VA_ARGS__, w, a)
#define SM_EACH_OF_4_D(M, ...) SM_EACH_OF_3_D(M, __VA_ARGS__) M(__VA_ARGS__, w, a)

#define SM_SWIZZLES(N)                                               \
  SM_EACH_OF_##N##_A(SM_SWIZZLE_1) SM_EACH_OF_##N##_A(SM_SECOND_##N) \
  SM_EACH_OF_##N##_A(SM_THIRD_##N) SM_EACH_OF_##N##_A(SM_FOURTH_##N)

#define SM_SECOND_2(...) SM_EACH_OF_2_B(SM_SWIZZLE_2, __VA_ARGS__)
#define SM_SECOND_3(...) SM_EACH_OF_3_B(SM_SWIZZLE_2, __VA_ARGS__)
#define SM_SECOND_4(...) SM_EACH_OF_4_B(SM_SWIZZLE_2, __VA_ARGS__)
#define SM_THIRD_2(...) SM_EACH_OF_2_B(SM_THIRD_OF_2, __VA_ARGS__)
#define SM_THIRD_3(...) SM_EACH_OF_3_B(SM_THIRD_OF_3, __VA_ARGS__)
#define SM_THIRD_4(...) SM_EACH_OF_4_B(SM_THIRD_OF_4, __VA_ARGS__)
#define SM_THIRD_OF_2(...) SM_EACH_OF_2_C(SM_SWIZZLE_3, __VA_ARGS__)
#define SM_THIRD_OF_3(...) SM_EACH_OF_3_C(SM_SWIZZLE_3, __VA_ARGS__)
#define SM_THIRD_OF_4(...) SM_EACH_OF_4_C(SM_SWIZZLE_3, __VA_ARGS__)
#define SM_FOURTH_2(...) SM_EACH_OF_2_B(SM_FOURTH_IN_2, __VA_ARGS__)
#define SM_FOURTH_3(...) SM_EACH_OF_3_B(SM_FOURTH_IN_3, __VA_ARGS__)
#define SM_FOURTH_4(...) SM_EACH_OF_4_B(SM_FOURTH_IN_4, __VA_ARGS__)
#define SM_FOURTH_IN_2(...) SM_EACH_OF_2_C(SM_FOURTH_OF_2, __VA_ARGS__)
#define SM_FOURTH_IN_3(...) SM_EACH_OF_3_C(SM_FOURTH_OF_3, __VA_ARGS__)
#define SM_FOURTH_IN_4(...) SM_EACH_OF_4_C(SM_FOURTH_OF_4, __VA_ARGS__)
#define SM_FOURTH_OF_2(...) SM_EACH_OF_2_D(SM_SWIZZLE_4, __VA_ARGS__)
#define SM_FOURTH_OF_3(...) SM_EACH_OF_3_D(SM_SWIZZLE_4, __VA_ARGS__)
#define SM_FOURTH_OF_4(...) SM_EACH_OF_4_D(SM_SWIZZLE_4, __VA_ARGS__)
