// The common part of the byte_split kernels for Arm: codes as signed bytes. Include this file after the ISA pragma.
#pragma once

#include "csrc/cpu/arm/vec_neon.h"
#include "csrc/cpu/kernels/byte_split_kernel.h"

namespace marlin::cpu {

// Two files instantiate this template, each for different CPU features. Each file passes its own `Family`. Otherwise
// the linker could merge two instances, and a CPU could run an instance whose features it lacks.
template <class Family, int of_activation>
struct NeonBytes : Neon {
  static constexpr int kBytes = of_activation;
  using Bytes = int8x16_t;
  using Sums = int32x4_t;
  static constexpr int kE2M1Offset = 0;
  static constexpr int kOperandsPerLoad = 4;

  static Sums set_sums(int32_t v) { return vdupq_n_s32(v); }
  static F to_float(Sums v) { return vcvtq_f32_s32(v); }
  static Bytes load_table(const int8_t* p) { return vld1q_s8(p); }
  static Bytes look_up(Bytes table, Bytes codes) { return vqtbl1q_s8(table, vreinterpretq_u8_s8(codes)); }
  template <int odd>
  static Bytes nibbles(I words) {
    const uint8x16_t bytes = vreinterpretq_u8_u32(words);
    return vreinterpretq_s8_u8(odd ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
  }
};

}  // namespace marlin::cpu
