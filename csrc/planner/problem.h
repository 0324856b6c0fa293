// The problems for which the planner makes plans. A problem's bytes are its key in the launch cache, so a problem has
// no padding. It also has no floats, because equal floats can differ in their bytes (0.0 and -0.0).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "csrc/core/gemm_variants.h"
#include "kernels/shared/kernel_list.h"

namespace marlin {

// A bool in four bytes, so that a struct has no padding.
struct Flag {
  constexpr Flag(bool value = false) : value(value ? 1 : 0) {}
  constexpr operator bool() const { return value != 0; }

 private:
  uint32_t value;
};

// A float that is compared by its bits.
struct FloatBits {
  constexpr FloatBits(float value = 0) : bits(std::bit_cast<uint32_t>(value)) {}
  constexpr operator float() const { return std::bit_cast<float>(bits); }

 private:
  uint32_t bits;
};

struct WeightProblem {
  WeightFormat format{};
  uint32_t K = 0;
  uint32_t N = 0;
  uint32_t group_size = 0;  // if larger than K, it counts as K
  ElementType scales = ElementType::float16;
  ElementType zeros = ElementType::float16;  // ignored if the format has no zeros
  ElementType super = ElementType::float16;  // type of super_scales and super_zeros; ignored for scales of one level
  bool has_perm = false;
  bool has_global_scale = false;
  bool global_scale_per_column = false;
  bool vector_aligned = false;  // true if loads of four elements are aligned at the start of the planes, scales and
                                // zero points
  Flag block_scales{};          // true if each scale is for a block of kScaleBlock x kScaleBlock weights
};

inline uint32_t group_size(const WeightProblem& weight) {
  return std::min(weight.group_size, weight.K);
}

struct GemmProblem {
  WeightProblem weight{};
  uint32_t M = 0;
  int64_t a_row_stride = 0;  // elements
  ElementType activations = ElementType::float16;
  ElementType bias = ElementType::float16;
  Flag has_bias{};
  Flag vector_aligned_a{};  // true if loads of four elements are aligned at the start of the activations
  NamedVariant variant{};
  // The variant that a tuner measured as the fastest, for "auto" to use; "auto" if there is no measurement.
  NamedVariant tuned{};
};

// A MoeGate that may be absent.
struct OptionalGate {
  OptionalGate() = default;
  OptionalGate(const MoeGate& gate)
      : present(true),
        activation(gate.activation),
        interleaved(gate.interleaved != 0),
        limit(gate.limit),
        alpha(gate.alpha) {}
  MoeGate value() const { return {activation, interleaved ? 1U : 0U, limit, alpha}; }

  Flag present{};
  int32_t activation = 0;
  Flag interleaved{};
  FloatBits limit{};
  FloatBits alpha{};
};

// The problem of moe_gemm: products of tokens with the weights of their experts. Each token has top_k slots, and each
// slot holds the number of an expert. A pair is a token and one of its slots.
struct MoeProblem {
  // the weight of one expert; M is the number of pairs, and a_row_stride is the distance between tokens
  GemmProblem product{};
  int64_t a_slot_stride = 0;  // elements; 0 if the slots of a token share one row
  uint32_t experts = 0;
  uint32_t top_k = 1;
  Flag wide_ids = true;  // true if expert_ids are int64, false if they are int32
  ElementType row_weights = ElementType::float32;
  Flag has_row_weights{};
  Flag reduce{};
  // A gated activation of the products. plan_moe includes it if one dispatch can compute both.
  OptionalGate gate{};
  uint32_t unused = 0;
};

inline uint32_t token_count(const MoeProblem& problem) {
  return problem.product.M / problem.top_k;
}

// Returns the number of rows of each expert in use, if the router spreads the pairs evenly.
inline uint32_t rows_of_expert(const MoeProblem& problem) {
  return ceil_divide(problem.product.M, std::min(problem.experts, problem.product.M));
}

struct DequantizeProblem {
  WeightProblem weight{};
  ElementType out = ElementType::float16;
};

}  // namespace marlin
