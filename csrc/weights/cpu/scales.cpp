#include "csrc/weights/cpu/scales.h"

#include <algorithm>

#include "csrc/cpu/formats.h"

namespace marlin::cpu {

namespace {

// Loads the scales or zeros of a group. If there are `super_values`, the scales or zeros are codes, and each code is
// multiplied by the super value of its block of kSuperBlock k.
void load_floating(const KernelSet& kernels, const PackedWeight& weight, const void* data, ElementType type,
                   const void* super_values, int64_t group, int64_t begin, int64_t count, float* out) {
  const void* from = element_at(data, type, group * weight.N + begin);
  if (super_values == nullptr) {
    kernels.to_float(from, type, count, out);
  } else {
    const int64_t row = group * weight.group_size / kSuperBlock * weight.N + begin;
    kernels.scale_codes(from, type, element_at(super_values, weight.super_type, row), weight.super_type, count, out);
  }
}

// Loads the scales of a group if each scale belongs to a block of kScaleBlock columns.
void load_of_blocks(const PackedWeight& weight, int64_t group, int64_t begin, int64_t count, float* out) {
  const int64_t first = group * weight.N + begin, last = first + count;
  for (int64_t i = first, end = first; i < last; i = end) {
    end = std::min((i / kScaleBlock + 1) * kScaleBlock, last);
    out = std::fill_n(out, end - i, load_element(weight.scales, weight.scales_type, i / kScaleBlock));
  }
}

}  // namespace

void load_group_scales(const KernelSet& kernels, const PackedWeight& weight, int64_t group, int64_t begin,
                       int64_t count, float* out) {
  const ScaleCoding coding = scale_coding(weight.format);
  if (weight.block_scales) {
    load_of_blocks(weight, group, begin, count, out);
  } else if (coding == ScaleCoding::floating) {
    load_floating(kernels, weight, weight.scales, weight.scales_type, weight.super_scales, group, begin, count, out);
  } else {
    kernels.decode_scales(static_cast<const uint8_t*>(weight.scales) + group * weight.N + begin, coding, count, out);
  }
}

void load_global_scale(const PackedWeight& weight, int64_t begin, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = weight.global_scale == nullptr ? 1.F : weight.global_scale[weight.global_scale_stride * (begin + i)];
}

void load_scales(const KernelSet& kernels, const PackedWeight& weight, int64_t group, int64_t begin, int64_t count,
                 float* out) {
  load_group_scales(kernels, weight, group, begin, count, out);
  if (weight.global_scale == nullptr) return;
  if (weight.global_scale_stride == 0) {
    for (int64_t i = 0; i < count; ++i)
      out[i] *= weight.global_scale[0];
  } else {
    for (int64_t i = 0; i < count; ++i)
      out[i] *= weight.global_scale[begin + i];
  }
}

void load_zeros(const KernelSet& kernels, const PackedWeight& weight, int64_t group, int64_t begin, int64_t count,
                float* out) {
  load_floating(kernels, weight, weight.zeros, weight.zeros_type, weight.super_zeros, group, begin, count, out);
}

}  // namespace marlin::cpu
