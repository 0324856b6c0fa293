// Operations across a simdgroup and a quadgroup: one overload for each type that an operation accepts. No operation
// accepts 64-bit integers. A bool would be promoted to an integer, so shuffles and broadcasts of a bool are deleted.
#pragma once

// bfloat is not among these types: MLX and candle define the functions for bfloat themselves, and candle notes that
// Metal has none.
#define SM_ON_LANE_TYPES(M, name) SM_WIDTHS(half, M, name) SM_WIDTHS(float, M, name) SM_INTEGERS_32(SM_WIDTHS, M, name)
#define SM_LANE_1(T, name) T name(T);
#define SM_LANE_2(T, name) T name(T, ushort);
#define SM_LANE_FILL(T, name) \
  T name(T, T, ushort);       \
  T name(T, T, ushort, ushort);
// This is a template, so that a program's own overload for bool is preferred, as in MLX.
#define SM_LANE_BOOL(name) template <typename T, typename = enable_if_t<is_same_v<T, bool>>> void name(T, ushort) = delete;
#define SM_REDUCES(name) SM_ON_LANE_TYPES(SM_LANE_1, name)
#define SM_JOINS(name) SM_INTEGERS_32(SM_WIDTHS, SM_LANE_1, name)
#define SM_SHUFFLES(name) SM_ON_LANE_TYPES(SM_LANE_2, name) SM_LANE_BOOL(name)

namespace metal {

#define SM_GROUP(group)                                                                                                \
  SM_REDUCES(group##_sum)                                                                                              \
  SM_REDUCES(group##_product) SM_REDUCES(group##_min) SM_REDUCES(group##_max) SM_REDUCES(group##_prefix_inclusive_sum) \
      SM_REDUCES(group##_prefix_exclusive_sum) SM_REDUCES(group##_prefix_inclusive_product)                            \
          SM_REDUCES(group##_prefix_exclusive_product) SM_REDUCES(group##_broadcast_first) SM_JOINS(group##_and)       \
              SM_JOINS(group##_or) SM_JOINS(group##_xor) SM_SHUFFLES(group##_broadcast) SM_SHUFFLES(group##_shuffle)   \
                  SM_SHUFFLES(group##_shuffle_xor) SM_SHUFFLES(group##_shuffle_up) SM_SHUFFLES(group##_shuffle_down)   \
                      SM_SHUFFLES(group##_shuffle_rotate_up) SM_SHUFFLES(group##_shuffle_rotate_down)                  \
                          SM_ON_LANE_TYPES(SM_LANE_FILL, group##_shuffle_and_fill_up)                                  \
                              SM_ON_LANE_TYPES(SM_LANE_FILL, group##_shuffle_and_fill_down) bool group##_all(bool);    \
  bool group##_any(bool);                                                                                              \
  bool group##_is_first();                                                                                             \
  bool group##_is_helper_thread();                                                                                     \
  struct group##_vote {                                                                                                \
    typedef ulong vote_t;                                                                                              \
    explicit group##_vote(vote_t = 0);                                                                                 \
    explicit operator vote_t() const;                                                                                  \
    bool all() const;                                                                                                  \
    bool any() const;                                                                                                  \
  };                                                                                                                   \
  group##_vote group##_ballot(bool);                                                                                   \
  group##_vote group##_active_threads_mask();
SM_GROUP(simd)
SM_GROUP(quad)
#undef SM_GROUP

// Other projects use this trait of Apple's library to ask which types these functions accept.
template <typename T>
struct __is_valid_simdgroup_type {
  static const __constant constexpr bool value = false;
};
#define SM_VALID(T, name)                                \
  template <>                                            \
  struct name<T> {                                       \
    static const __constant constexpr bool value = true; \
  };
SM_ON_LANE_TYPES(SM_VALID, __is_valid_simdgroup_type)
#undef SM_VALID

}  // namespace metal
