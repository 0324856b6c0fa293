// Looks up rows of an embedding table, which are columns of its packed weight.
#include <cmath>
#include <limits>

#include "csrc/core/math.h"
#include "csrc/cpu/formats.h"
#include "csrc/weights/cpu/api.h"

namespace marlin::cpu {

namespace {

constexpr int64_t kGrainCodes = 4096;  // codes per task: decoding them takes about as long as waking a thread

// Returns the second-level scale that multiplies a group's scale or zero; 1 for scales of one level.
float super_of(const PackedWeight& weight, const void* values, int64_t group, int64_t n) {
  const int64_t row = group * weight.group_size / kSuperBlock;
  return values == nullptr ? 1.F : load_element(values, weight.super_type, row * weight.N + n);
}

float scale_of(const PackedWeight& weight, int64_t group, int64_t n) {
  const int64_t index = group * weight.N + n;
  const ScaleCoding coding = scale_coding(weight.format);
  if (coding == ScaleCoding::floating)
    return load_element(weight.scales, weight.scales_type, weight.block_scales ? index / kScaleBlock : index) *
           super_of(weight, weight.super_scales, group, n);
  const uint8_t code = static_cast<const uint8_t*>(weight.scales)[index];
  if (coding == ScaleCoding::e8m0) return e8m0_to_float(code);
  const float scale = e4m3_to_float(code);
  return weight.global_scale == nullptr ? scale : scale * weight.global_scale[weight.global_scale_stride * n];
}

void store(void* out, ElementType type, int64_t index, float value) {
  if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
  switch (type) {
    case ElementType::float16:
      static_cast<uint16_t*>(out)[index] = float_to_half(value);
      break;
    case ElementType::bfloat16:
      static_cast<uint16_t*>(out)[index] = float_to_bfloat16(value);
      break;
    default:
      static_cast<float*>(out)[index] = value;
  }
}

// Decodes column n in the order of the format's formula (kernels/shared/types.h). Rounds each product and sum to fp32.
void decode_column(const EmbeddingArguments& arguments, const float* values, int64_t n, int64_t row) {
  const PackedWeight& weight = arguments.weight;
  const uint32_t per_word = codes_per_word(weight.format), bits = 32 / per_word;
  const uint32_t high = high_bits(weight.format), per_high_word = k_per_high_word(high);
  const ZerosRole role = zeros_role(weight.format);
  float scale = 0, zero = 0;
  for (int64_t k = 0; k < weight.K; ++k) {
    if (k % weight.group_size == 0) {
      const int64_t group = k / weight.group_size;
      scale = scale_of(weight, group, n);
      if (role != ZerosRole::none)
        zero = load_element(weight.zeros, weight.zeros_type, group * weight.N + n) *
               super_of(weight, weight.super_zeros, group, n);
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
    store(arguments.out, arguments.out_type, row * weight.K + place, value);
  }
}

}  // namespace

void embedding(const EmbeddingArguments& arguments, const Parallel& parallel) {
  const PackedWeight& weight = arguments.weight;
  const float* values = code_values(weight.format, weight.lut);
  const int64_t grain = ceil_divide(kGrainCodes, weight.K);
  parallel.run(arguments.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      decode_column(arguments, values, arguments.ids[row], row);
  });
}

}  // namespace marlin::cpu
