// Replaces Apple's matmul2d when the instructions around matmul2d are counted, because no offline compiler supports the
// tensor units. A product of 16 x 32 x 16 becomes 8 ffma and 8 fadd, which use all 24 elements of the operands that a
// lane holds. These 16 instructions per call are subtracted from the counts.
#pragma once

#include <metal_stdlib>

namespace mpp {
namespace tensor_ops {

template <typename T>
struct stub_operand {
  T e[16];
  thread T& operator[](int i) thread { return e[i]; }
};

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m;
  constexpr matmul2d_descriptor(int, int, int = -1, bool = false, bool = false, bool = false, mode = mode::multiply)
      : m(0) {}
  constexpr operator int() const thread { return m; }
};

template <int Descriptor, typename Scope>
struct matmul2d {
  template <typename A, typename B, typename C, typename I = int>
  stub_operand<A> get_left_input_cooperative_tensor() thread {
    stub_operand<A> undefined;
    return undefined;
  }
  template <typename A, typename B, typename C, typename I = int>
  stub_operand<B> get_right_input_cooperative_tensor() thread {
    stub_operand<B> undefined;
    return undefined;
  }
  template <typename A, typename B, typename C, typename I = int>
  stub_operand<C> get_destination_cooperative_tensor() thread {
    stub_operand<C> undefined;
    return undefined;
  }
  template <typename A, typename B, typename C>
  void run(thread A& a, thread B& b, thread C& c) thread {
    for (int i = 0; i < 8; ++i)
      c[i] += (float)a[i] * (float)b[i];
    for (int i = 8; i < 16; ++i)
      c[i] += (float)b[i];
  }
};

}  // namespace tensor_ops
}  // namespace mpp

namespace metal {
struct execution_simdgroup {};
}  // namespace metal
