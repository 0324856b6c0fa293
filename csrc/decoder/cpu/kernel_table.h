// The functions behind the decoder layer's operators, for each instruction set. All functions compute in fp32.
#pragma once

#include <cstdint>

#include "csrc/cpu/capability.h"
#include "kernels/decoder/params.h"

namespace marlin::cpu {

inline constexpr int kActivationBlock = 512;  // number of elements that are computed at a time
inline constexpr int kActivationUnit = 16;    // number of elements in the widest vector of any instruction set

// `gate` and `up` are readable, and `out` is writable, up to the next multiple of kActivationUnit elements.
struct GatedBlock {
  const float* gate;  // [count]
  const float* up;
  float* out;  // may be `gate`
  int count;
  float limit;
  float alpha;
};

// The rotation of one head of one token. The elements of a head are rotated in pairs: element i with partner j becomes
// x_i cos_i + x_j sin_i. In each pair, one sine has a minus sign, and `sin` includes this sign.
struct RotaryRow {
  const float* x;    // [2 * pairs]
  const float* cos;  // [2 * pairs]
  const float* sin;
  int64_t pairs;
  bool interleaved;
  float* out;  // must not be x
};

struct DecoderFunctions {
  void (*activate)(Activation, const GatedBlock&);
  double (*sum_of_squares)(const float* x, int64_t count);
  void (*add_rows)(const float* x, const float* y, int64_t count, float* out);  // out may be x
  // Computes x * factor * weight; out may be x.
  void (*scale_row)(const float* x, float factor, const float* weight, int64_t count, float* out);
  void (*rotate_row)(const RotaryRow&);
};

const DecoderFunctions& decoder_functions(Isa isa);

// Each function returns nullptr if this build has no code for its instruction set.
const DecoderFunctions* portable_decoder_functions();
const DecoderFunctions* avx2_decoder_functions();
const DecoderFunctions* avx512_decoder_functions();
const DecoderFunctions* neon_decoder_functions();

}  // namespace marlin::cpu
