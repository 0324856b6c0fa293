// Calls a kernel with its arguments. C++ deduces the arguments' types from the kernel. This file is compiled together
// with the translated source of every Metal library, after metal_stdlib.
#pragma once

#include "../executor/abi.h"

namespace sm {

template <class T>
struct Target {  // the type to which a pointer or reference refers
  static constexpr bool is_buffer = false, is_reference = false;
  using type = char;
};
template <class T>
struct Target<T*> {
  static constexpr bool is_buffer = true, is_reference = false;
  using type = T;
};
template <class T>
struct Target<T&> {
  static constexpr bool is_buffer = true, is_reference = true;
  using type = T;
};

template <class T>
struct Extent {
  static constexpr uint32_t size = sizeof(T), align = alignof(T);
};
template <>
struct Extent<void> {
  static constexpr uint32_t size = 1, align = 1;
};
template <>
struct Extent<const void> : Extent<void> {};

template <class F>
struct Signature;
template <class... A>
struct Signature<void (*)(A...)> {
  template <unsigned I>
  using parameter = __type_pack_element<I, A...>;
};

template <class F, unsigned I>
inline sm_argument argument(const char* name, uint32_t kind, uint32_t index, bool is_constant) {
  using P = typename Signature<F>::template parameter<I>;
  static_assert(Target<P>::is_buffer, "a buffer argument is a pointer or a reference");
  using T = typename Target<P>::type;
  return {name, kind, index, is_constant || __is_const(T), Target<P>::is_reference, Extent<T>::size, Extent<T>::align};
}

template <class T>
inline T place(void* address) {
  if constexpr (Target<T>::is_reference) {
    return *static_cast<typename Target<T>::type*>(address);
  } else {
    return static_cast<T>(address);
  }
}

// Returns the buffer index of the n-th argument without a stated index. Skips the indices that other arguments state.
template <unsigned N, auto... Used>
constexpr unsigned free_index() {
  unsigned left = N;
  for (unsigned i = 0;; ++i) {
    bool is_used = ((static_cast<unsigned>(Used) == i) || ... || false);
    if (!is_used && left-- == 0) return i;
  }
}

template <auto... Used>
constexpr bool are_distinct() {
  unsigned long long seen = 0;
  bool distinct = true;
  ((distinct = distinct && !(seen >> static_cast<unsigned>(Used) & 1), seen |= 1ull << static_cast<unsigned>(Used)),
   ...);
  return distinct;
}

template <unsigned Index>
struct Buffer {
  static_assert(Index < 31, "buffer indices go from 0 to 30");
  template <class T>
  static T get(const sm_bindings* bindings) {
    return place<T>(bindings->buffers[Index]);
  }
};

template <unsigned Index>
struct Threadgroup {
  static_assert(Index < 31, "threadgroup indices go from 0 to 30");
  template <class T>
  static T get(const sm_bindings* bindings) {
    return place<T>(bindings->threadgroup[Index]);
  }
};

inline sm_uint3 spread(uint32_t value) {
  return {value, 1, 1};
}
inline sm_uint3 spread(sm_uint3 value) {
  return value;
}

#define SM_BUILTIN(name, value) \
  struct name {                 \
    static sm_uint3 read() {    \
      return spread(value);     \
    }                           \
  };
SM_BUILTIN(thread_position_in_grid, sm_self->thread_position_in_grid)
SM_BUILTIN(thread_position_in_threadgroup, sm_self->thread_position_in_threadgroup)
SM_BUILTIN(thread_index_in_threadgroup, sm_self->thread_index_in_threadgroup)
SM_BUILTIN(thread_index_in_simdgroup, sm_self->thread_index_in_simdgroup)
SM_BUILTIN(thread_index_in_quadgroup, sm_self->thread_index_in_simdgroup % 4)
SM_BUILTIN(threadgroup_position_in_grid, sm_self->threadgroup_position_in_grid)
SM_BUILTIN(threadgroups_per_grid, sm_self->threadgroups_per_grid)
SM_BUILTIN(threads_per_grid, sm_self->threads_per_grid)
SM_BUILTIN(threads_per_threadgroup, sm_self->threads_per_threadgroup)
SM_BUILTIN(dispatch_threads_per_threadgroup, sm_self->dispatch_threads_per_threadgroup)
SM_BUILTIN(simdgroup_index_in_threadgroup, sm_self->simdgroup_index_in_threadgroup)
SM_BUILTIN(simdgroups_per_threadgroup, sm_self->simdgroups_per_threadgroup)
SM_BUILTIN(quadgroup_index_in_threadgroup, sm_self->thread_index_in_threadgroup / 4)
SM_BUILTIN(thread_execution_width, 32u)
SM_BUILTIN(threads_per_simdgroup, 32u)
SM_BUILTIN(grid_size, sm_self->threads_per_grid)
#undef SM_BUILTIN

inline uint32_t volume(sm_uint3 v) {
  return v.x * v.y * v.z;
}
struct dispatch_simdgroups_per_threadgroup {
  static sm_uint3 read() { return spread((volume(sm_self->dispatch_threads_per_threadgroup) + 31) / 32); }
};
struct quadgroups_per_threadgroup {
  static sm_uint3 read() { return spread((volume(sm_self->threads_per_threadgroup) + 3) / 4); }
};
struct dispatch_quadgroups_per_threadgroup {
  static sm_uint3 read() { return spread((volume(sm_self->dispatch_threads_per_threadgroup) + 3) / 4); }
};
struct grid_origin {
  static sm_uint3 read() { return {0, 0, 0}; }
};

template <class T>
struct Position {
  static T make(sm_uint3 v) { return static_cast<T>(v.x); }
};
template <class T>
struct Position<metal::vec<T, 2>> {
  static metal::vec<T, 2> make(sm_uint3 v) { return metal::vec<T, 2>(static_cast<T>(v.x), static_cast<T>(v.y)); }
};
template <class T>
struct Position<metal::vec<T, 3>> {
  static metal::vec<T, 3> make(sm_uint3 v) {
    return metal::vec<T, 3>(static_cast<T>(v.x), static_cast<T>(v.y), static_cast<T>(v.z));
  }
};
template <class T>
struct Position<const T> : Position<T> {};

template <class Source>
struct Builtin {
  template <class T>
  static T get(const sm_bindings*) {
    return Position<T>::make(Source::read());
  }
};

template <auto F, class... S>
struct Call;
template <class... A, void (*F)(A...), class... S>
struct Call<F, S...> {
  // The kernel is inlined into its entry, so that the declarations of threadgroup variables are inside the entry.
  __attribute__((always_inline)) static void run(const sm_bindings* bindings) { F(S::template get<A>(bindings)...); }
};

// The section sm_sites lists each threadgroup variable with the address of the code that declares it. Before a kernel's
// first run, the executor computes the kernel's static threadgroup memory from this list.
template <class T, unsigned Site, unsigned Align>
__attribute__((always_inline)) inline T& threadgroup_variable() {
  constexpr uint32_t align = Align > alignof(T) ? Align : alignof(T);
  asm volatile("661:\n\t.pushsection sm_sites,\"aw\",@progbits\n\t.quad 661b\n\t.long %c0, %c1, %c2, 0\n\t.popsection"
               :
               : "i"(Site), "i"(sizeof(T)), "i"(align));
  return *static_cast<T*>(sm_threadgroup_variable(Site, sizeof(T), align));
}

template <class T, class... V>
inline T constant_value(V... values) {
  return T(values...);
}

// A function constant without a value. Its use is a fault. For a vector, the use of one member cannot be detected, so
// the members have poison values instead.
template <class T, bool IsVector = __is_class(T)>
struct UndefinedConstant {
  const char* name;
  operator T() const {
    sm_undefined_function_constant(name);
    return T();
  }
};
template <class T>
struct UndefinedConstant<T, true> : T {
  UndefinedConstant(const char*) { __builtin_memset(static_cast<T*>(this), 0xFF, sizeof(T)); }
};

}  // namespace sm

extern "C" {
extern const sm_threadgroup_site __start_sm_sites[] __attribute__((weak, visibility("hidden")));
extern const sm_threadgroup_site __stop_sm_sites[] __attribute__((weak, visibility("hidden")));
}

#ifdef __SANITIZE_THREAD__
#define SM_CHECKED 1
#elif __has_feature(thread_sanitizer)
#define SM_CHECKED 1
#else
#define SM_CHECKED 0
#endif

#define SM_TABLE(kernel_count, constant_count)                                          \
  extern "C" __attribute__((visibility("default"))) const sm_library_table sm_table = { \
      SM_CHECKED, kernel_count, sm_kernels, constant_count, sm_constants, __start_sm_sites, __stop_sm_sites};
