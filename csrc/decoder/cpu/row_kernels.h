// Functions on rows of fp32 values. The compiler vectorizes the loops for the target of the file that includes this
// header. No function calls the vector policy V (vec_*.h): V only makes the instantiations of each target distinct, so
// that the linker does not merge them.
#pragma once

#include <algorithm>

#include "csrc/decoder/cpu/kernel_table.h"

namespace marlin::cpu {

// Adds the squares of each block to kPartialSums separate fp32 sums, because each addition to a single sum would wait
// for the previous one. Adds the partial sums in fp64 at the end.
template <class V>
double sum_of_squares(const float* x, int64_t count) {
  constexpr int64_t kBlock = 512;
  constexpr int kPartialSums = 32;
  double total = 0;
  int64_t i = 0;
  while (i + kPartialSums <= count) {
    const int64_t end = std::min(count, i + kBlock);
    float sums[kPartialSums] = {};
    for (; i + kPartialSums <= end; i += kPartialSums)
      for (int c = 0; c < kPartialSums; ++c)
        sums[c] += x[i + c] * x[i + c];
    for (float sum : sums)
      total += static_cast<double>(sum);
  }
  for (; i < count; ++i)
    total += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return total;
}

template <class V>
void add_rows(const float* x, const float* y, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = x[i] + y[i];
}

template <class V>
void scale_row(const float* x, float factor, const float* weight, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = x[i] * factor * weight[i];
}

template <class V>
void rotate_row(const RotaryRow& row) {
  const float* __restrict x = row.x;
  const float* __restrict cos = row.cos;
  const float* __restrict sin = row.sin;
  float* __restrict out = row.out;
  const int64_t pairs = row.pairs;
  if (row.interleaved) {
    for (int64_t i = 0; i < 2 * pairs; i += 2) {
      out[i] = x[i] * cos[i] + x[i + 1] * sin[i];
      out[i + 1] = x[i + 1] * cos[i + 1] + x[i] * sin[i + 1];
    }
    return;
  }
  for (int64_t i = 0; i < pairs; ++i) {
    const float one = x[i];
    const float other = x[i + pairs];
    out[i] = one * cos[i] + other * sin[i];
    out[i + pairs] = other * cos[i + pairs] + one * sin[i + pairs];
  }
}

}  // namespace marlin::cpu
