// Looks up rows of an embedding table, which are columns of its packed weight.
#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/core/math.h"
#include "csrc/cpu/formats.h"
#include "csrc/cpu/scratch.h"
#include "csrc/weights/cpu/api.h"
#include "csrc/weights/cpu/scales.h"

namespace marlin::cpu {

namespace {

constexpr int64_t kGrainCodes = 4096;  // codes per task: decoding them takes about as long as waking a thread

// Decodes column n in the order of the format's formula (kernels/shared/types.h). Rounds each product and sum to fp32.
// Every NaN becomes the canonical quiet NaN.
void decode_column(const EmbeddingArguments& arguments, const KernelSet& kernels, const float* values, int64_t n,
                   float* out) {
  const PackedWeight& weight = arguments.weight;
  const uint32_t per_word = codes_per_word(weight.format), bits = 32 / per_word;
  const uint32_t high = high_bits(weight.format), per_high_word = k_per_high_word(high);
  const ZerosRole role = zeros_role(weight.format);
  float scale = 0, zero = 0;
  for (int64_t k = 0; k < weight.K; ++k) {
    if (k % weight.group_size == 0) {
      const int64_t group = k / weight.group_size;
      load_scales(kernels, weight, group, n, 1, &scale);
      if (role != ZerosRole::none) load_zeros(kernels, weight, group, n, 1, &zero);
    }
    const uint32_t word = weight.words[k / per_word * weight.N + n];
    uint32_t code = (word >> (bits * (k % per_word))) & ((1U << bits) - 1);
    if (high != 0) {
      const uint32_t upper = weight.high[k / per_high_word * weight.N + n] >> high_bit(high, static_cast<uint32_t>(k));
      code += (upper & ((1U << high) - 1)) << bits;
    }
    float value = values[code];
    if (role == ZerosRole::zero_point) value -= zero;
    value *= scale;
    if (role == ZerosRole::bias) {
      volatile float rounded = value;  // volatile prevents a fused multiply-add
      value = rounded + zero;
    }
    const int64_t place = arguments.perm == nullptr ? k : arguments.perm[k];
    out[place] = std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : value;
  }
}

}  // namespace

void embedding(const EmbeddingArguments& arguments, const Parallel& parallel) {
  const PackedWeight& weight = arguments.weight;
  const KernelSet& kernels = *kernels_of(capability().isa);
  const float* values = code_values(weight.format, weight.lut);
  parallel.run(arguments.count, ceil_divide(kGrainCodes, weight.K), [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* column = scratch.get<float>(weight.K);
    for (int64_t row = begin; row < end; ++row) {
      std::fill_n(column, weight.K, 0.F);  // a perm with repeated indices leaves some elements unwritten
      decode_column(arguments, kernels, values, arguments.ids[row], column);
      kernels.from_float(column, arguments.out_type, weight.K,
                         element_at(arguments.out, arguments.out_type, row * weight.K));
    }
  });
}

}  // namespace marlin::cpu
