// The fp32 functions of the mLSTM, as one table for each instruction set.
#pragma once

#include <array>
#include <cstdint>

#include "csrc/cpu/capability.h"

namespace marlin::cpu {

// Computes out = beta * out + a @ b for a block of rows and a strip of columns. If beta is 0, `out` is not read.
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
// The elementwise functions process whole vectors, so their arrays are padded to a multiple of this length.
inline constexpr int64_t kMlstmPadding = 16;

struct MlstmKernels {
  int strip;
  int max_rows;
  std::array<void (*)(const MlstmProduct&), kMaxMlstmRows + 1> product;
  // As `product`, but row i has i + 1 terms after the first k terms. These are the terms of the chunk's tokens up to
  // token i, because a token does not use later tokens.
  std::array<void (*)(const MlstmProduct&), kMaxMlstmRows + 1> causal_product;
  // Computes p[l] *= scale * exp((row_high + high[l]) + (row_low + low[l])) and returns the sum of p.
  float (*weigh)(float* p, const float* high, const float* low, float row_high, float row_low, float scale,
                 int64_t count);
  void (*scale)(float* x, float scale, int64_t count);              // in place
  void (*multiply)(float* x, const float* weights, int64_t count);  // in place
  // Computes x *= scale and returns the dot product of the new x with n.
  float (*scale_and_dot)(float* x, float scale, const float* n, int64_t count);
  void (*exp)(float* x, int64_t count);  // in place; x <= 88
  // Computes out = log(1 + exp(-|f|)), which is min(f, 0) - log_sigmoid(f).
  void (*softplus)(const float* f, float* out, int64_t count);
  // Updates one row of a state with one token: to = forget * from + key * v. Then computes numerator += query * to.
  void (*step_row)(const float* from, float* to, const float* v, float* numerator, float forget, float key, float query,
                   int64_t count);
};

// Returns the kernels of an instruction set that this build supports.
const MlstmKernels* mlstm_kernels_of(Isa isa);
const MlstmKernels* portable_mlstm_kernels();
const MlstmKernels* avx2_mlstm_kernels();
const MlstmKernels* avx512_mlstm_kernels();
const MlstmKernels* neon_mlstm_kernels();

}  // namespace marlin::cpu
