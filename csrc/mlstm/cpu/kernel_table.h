// The fp32 functions of an instruction-set family for the mLSTM, as a table.
#pragma once

#include <array>
#include <cstdint>

#include "csrc/cpu/capability.h"

namespace marlin::cpu {

// A block of rows times a strip of columns: out = beta * out + a @ b. out is not read if beta is 0.
struct MlstmProduct {
  const float* a;  // [rows, k] with any strides
  int64_t a_row;
  int64_t a_k;
  const float* b;  // [k, strip]
  int64_t ld_b;
  int64_t k;
  float beta;
  float* out;  // [rows, strip]
  int64_t ld_out;
};

inline constexpr int kMaxMlstmRows = 12;
// The arrays of the elementwise functions have room for a multiple of this, which is whole vectors.
inline constexpr int64_t kMlstmPadding = 16;

struct MlstmKernels {
  int strip;
  int max_rows;
  std::array<void (*)(const MlstmProduct&), kMaxMlstmRows + 1> product;
  // The same, and then `rows` more steps of k, of which row i takes the first i + 1: a token does not see later ones.
  std::array<void (*)(const MlstmProduct&), kMaxMlstmRows + 1> causal_product;
  // p[l] *= scale * exp((row_high + high[l]) + (row_low + low[l])); returns the sum.
  float (*weigh)(float* p, const float* high, const float* low, float row_high, float row_low, float scale,
                 int64_t count);
  void (*scale)(float* x, float scale, int64_t count);              // in place
  void (*multiply)(float* x, const float* weights, int64_t count);  // in place
  // x *= scale; returns the sum of scale * x * n.
  float (*scale_and_dot)(float* x, float scale, const float* n, int64_t count);
  void (*exp)(float* x, int64_t count);  // in place; x <= 88
  // log(1 + exp(-|f|)), which is min(f, 0) - log_sigmoid(f).
  void (*softplus)(const float* f, float* out, int64_t count);
  // One row of a state through one token: to = forget * from + key * v; numerator += query * to.
  void (*step_row)(const float* from, float* to, const float* v, float* numerator, float forget, float key, float query,
                   int64_t count);
};

// The kernels of a family that this build has code for.
const MlstmKernels* mlstm_kernels_of(Isa isa);
const MlstmKernels* portable_mlstm_kernels();
const MlstmKernels* avx2_mlstm_kernels();
const MlstmKernels* avx512_mlstm_kernels();
const MlstmKernels* neon_mlstm_kernels();

}  // namespace marlin::cpu
