#include "csrc/mlstm/cpu/gates.h"

#include <algorithm>
#include <cmath>

#include "csrc/core/math.h"
#include "csrc/mlstm/problem.h"

namespace marlin::cpu {

namespace {

// Lower gates are replaced by this value. It has the same effect as -inf, but keeps the fp64 sums finite and precise
// enough.
constexpr double kLowestGate = -1e8;

void split(double value, float* high, float* low) {
  *high = static_cast<float>(value);
  *low = std::isfinite(*high) ? static_cast<float>(value - *high) : 0.F;
}

}  // namespace

// Computes sums in fp64, because a sum of many decays would lose its low bits in fp32.
void MlstmGates::compute(const MlstmKernels& kernels, int64_t count, float state_m, double* exact_m) {
  const int64_t padded = round_up(count, kMlstmPadding);
  kernels.softplus(f, floor, padded);
  double b = 0.0;
  double sums[kMlstmChunkSizes.back()];
  double inputs[kMlstmChunkSizes.back()];
  for (int64_t j = 0; j < count; ++j) {
    const double decay = std::max<double>(std::min(f[j], 0.F) - double{floor[j]}, kLowestGate);
    const double i = std::max<double>(m[j], kLowestGate);
    b += decay;
    *exact_m = std::max(decay + *exact_m, i);
    sums[j] = b;
    inputs[j] = i;
    m[j] = static_cast<float>(*exact_m);
    from_state[j] = static_cast<float>(b + state_m - m[j]);
    split(b - m[j], &row_high[j], &row_low[j]);
    split(i - b, &key_high[j], &key_low[j]);
    floor[j] = std::min(-m[j], 88.F);
  }
  for (int64_t j = 0; j < count; ++j)
    to_state[j] = static_cast<float>(b - sums[j] + inputs[j] - m[count - 1]);
  kernels.exp(from_state, padded);
  kernels.exp(to_state, padded);
  kernels.exp(floor, padded);
  for (int64_t j = 0; j < count; ++j) {
    if (m[j] < -88.F) floor[j] = std::exp(-m[j]);
  }
  whole = from_state[count - 1];
}

}  // namespace marlin::cpu
