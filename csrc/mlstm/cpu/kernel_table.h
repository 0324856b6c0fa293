// What an instruction-set family offers to the mLSTM's chunkwise form: a table of functions over fp32.
#pragma once

#include <array>
#include <cstdint>

namespace marlin::cpu {

// A block of rows times a strip of columns: out = beta * out + a @ b, out not read where beta is 0.
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
// Arrays that the elementwise functions work on have room for whole vectors: up to a multiple of this.
inline constexpr int64_t kMlstmPadding = 16;

struct MlstmKernels {
  int strip;
  int max_rows;
  std::array<void (*)(const MlstmProduct&), kMaxMlstmRows + 1> product;
  // `rows` more steps of k: row i takes the first i + 1 of them, since a token sees no later one.
  std::array<void (*)(const MlstmProduct&), kMaxMlstmRows + 1> causal_product;
  // p[l] *= scale * exp((row_high + high[l]) + (row_low + low[l])); returns the sum.
  float (*weigh)(float* p, const float* high, const float* low, float row_high, float row_low, float scale,
                 int64_t count);
  void (*scale)(float* x, float scale, int64_t count);              // in place
  void (*multiply)(float* x, const float* weights, int64_t count);  // in place
  // x *= scale; returns the sum of scale * x * n.
  float (*scale_and_dot)(float* x, float scale, const float* n, int64_t count);
  void (*exp)(float* x, int64_t count);  // in place; x <= 88
  // log(1 + exp(-|f|)): what log-sigmoid(f) lacks to min(f, 0).
  void (*softplus)(const float* f, float* out, int64_t count);
  // One row of a state through one token: to = forget * from + key * v; numerator += query * to.
  void (*step_row)(const float* from, float* to, const float* v, float* numerator, float forget, float key, float query,
                   int64_t count);
};

}  // namespace marlin::cpu
