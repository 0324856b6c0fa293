// Atomics, with the operations that each type supports in each memory. Floats are atomic in device memory only, and
// 64-bit numbers have minimum and maximum only.
#pragma once

// C++ for OpenCL has different types with these names, so Metal's types are declared under other names.
#define atomic_int sm_word_atomic_int
#define atomic_uint sm_word_atomic_uint
#define atomic_float sm_word_atomic_float
#define atomic_ulong sm_word_atomic_ulong

namespace metal {

template <typename T>
struct atomic {
  static_assert(__is_same(T, int) || __is_same(T, uint) || __is_same(T, bool) || __is_same(T, float) ||
                    __is_same(T, ulong),
                "atomic<T> exists for int, uint, bool, float and ulong");
  atomic() = default;
  atomic(const __generic atomic&) = delete;
  __generic atomic& operator=(const __generic atomic&) = delete;
  T sm_value;
};
template <typename T>
using _atomic = atomic<T>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;

#define SM_BASICS(space, T)                                               \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);  \
  void atomic_store_explicit(volatile space atomic<T>*, T, memory_order); \
  T atomic_exchange_explicit(volatile space atomic<T>*, T, memory_order); \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, __private T*, T, memory_order, memory_order);
#define SM_FETCH(space, T, name) T atomic_fetch_##name##_explicit(volatile space atomic<T>*, T, memory_order);
#define SM_LOGIC(space, T) SM_FETCH(space, T, and) SM_FETCH(space, T, or) SM_FETCH(space, T, xor)
#define SM_COUNTS(space, T) \
  SM_BASICS(space, T)       \
  SM_LOGIC(space, T) SM_FETCH(space, T, add) SM_FETCH(space, T, sub) SM_FETCH(space, T, min) SM_FETCH(space, T, max)
#define SM_SPACE(space) SM_COUNTS(space, int) SM_COUNTS(space, uint) SM_BASICS(space, bool) SM_LOGIC(space, bool)
SM_SPACE(__global)
SM_SPACE(__local)
#if SM_METAL_VERSION >= 300
typedef atomic<float> atomic_float;
SM_BASICS(__global, float)
SM_FETCH(__global, float, add)
SM_FETCH(__global, float, sub)
#endif
#if SM_METAL_VERSION >= 240
typedef atomic<ulong> atomic_ulong;
void atomic_min_explicit(volatile __global atomic<ulong>*, ulong, memory_order);
void atomic_max_explicit(volatile __global atomic<ulong>*, ulong, memory_order);
#endif
#undef SM_BASICS
#undef SM_FETCH
#undef SM_LOGIC
#undef SM_COUNTS
#undef SM_SPACE

}  // namespace metal
