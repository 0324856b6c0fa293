// Functions for the experts of a mixture: the expert of a pair, and the product with one expert's weight.
#pragma once

#include "kernels/experts/params.h"
#include "kernels/gemm/product.h"

namespace marlin {

// Returns the expert of a pair, or `experts` if the pair's id is not the number of an expert.
MARLIN_INLINE uint expert_of(const device uchar* ids, uint pair, uint id_bytes, uint experts) {
  const long id = id_bytes == 8 ? reinterpret_cast<const device long*>(ids)[pair]
                                : long(reinterpret_cast<const device int*>(ids)[pair]);
  return id >= 0 && id < long(experts) ? uint(id) : experts;
}

MARLIN_INLINE uint bytes_of(int type) {
  return element_bytes(ElementType(type));
}

// Returns a copy of `product` with the tensors of expert `expert` in place of those of expert 0.
template <WeightFormat format, typename T>
MARLIN_INLINE Product<T> product_of_expert(thread Product<T>& product, uint expert, constant MoeParams& params) {
  const ulong N = params.product.N;
  const ulong groups = ceil_divide(params.product.K, params.product.group_size) * N;
  Product<T> moved = product;
  moved.weight.packed += expert * (params.product.K / codes_per_word(format) * N);
  if (has_high_plane(format)) {
    moved.weight.high += expert * (ceil_divide(params.product.K, k_per_high_word(high_bits(format))) * N);
  }
  const ulong scales = has_block_scales<format>() ? groups / kScaleBlock : groups;
  moved.weight.scales += expert * scales * (has_coded_scales(format) ? 1 : bytes_of(scales_type));
  if (zeros_role(format) != ZerosRole::none) {
    moved.weight.zeros += expert * groups * bytes_of(zeros_type);
  }
  const ulong supers = expert * ceil_divide(params.product.K, kSuperBlock) * N * bytes_of(super_type);
  if (has_super_scales<format>()) moved.weight.super_scales += supers;
  if (has_super_zeros<format>()) moved.weight.super_zeros += supers;
  if (has_global_scale) moved.weight.global_scale += ulong(expert) * params.global_scale_expert_stride;
  if (has_perm) moved.a.perm += ulong(expert) * params.product.K;
  if (has_bias) moved.output.bias += expert * N * bytes_of(bias_type);
  return moved;
}

template <typename T>
MARLIN_INLINE const device T* row_of_pair(const device T* a, uint pair, constant MoeParams& params) {
  return a + int64_t(pair / params.top_k) * params.product.a_row_stride +
         int64_t(pair % params.top_k) * params.a_slot_stride;
}

MARLIN_INLINE float bias_of(const device uchar* bias, uint expert, uint n, uint N) {
  return has_bias ? load_element(bias, ulong(expert) * N + n, bias_type) : 0.0f;
}

MARLIN_INLINE float weight_of(const device uchar* row_weights, uint pair, int type) {
  return type >= 0 ? load_element(row_weights, pair, type) : 1.0f;
}

// Returns a pair's term in the sum of its token. contract(off) prevents an fma of the term with that sum, so all
// kernels that add terms in the same order give the same bits.
MARLIN_INLINE float term_of(float product, float bias, float weight) {
#pragma clang fp contract(off)
  const float biased = product + bias;
  return biased * weight;
}

}  // namespace marlin

#define MARLIN_MOE_BUFFERS MARLIN_PRODUCT_TENSORS, constant MoeParams& params [[buffer(kSlotParams)]]
