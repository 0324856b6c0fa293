// The problems that the planner plans.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/shared/variants.h"

namespace marlin {

struct WeightProblem {
  WeightFormat format{};
  uint32_t K = 0;
  uint32_t N = 0;
  uint32_t group_size = 0;  // if larger than K, it counts as K
  ElementType scales = ElementType::float16;
  ElementType zeros = ElementType::float16;  // ignored if the format has none
  bool has_perm = false;
  bool has_global_scale = false;
  bool global_scale_per_column = false;
  bool vector_aligned = false;  // packed words, scales and zero points start aligned for loads of four elements
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
  bool has_bias = false;
  bool vector_aligned_a = false;  // activations start aligned for loads of four elements
  // "auto", a variant of core/gemm_variants.h, or a variant and a tile ("double_buffered:128x64x16").
  std::string_view variant = "auto";
  // The variant that a tuner measured to be best, which "auto" then uses; empty if nothing was measured.
  std::string_view tuned{};
};

// The products of tokens with the weights of their experts. Each token has top_k slots, and each slot names an expert.
// A pair is a token and one of its slots.
struct MoeProblem {
  // the weight of one expert; M is the number of pairs, a_row_stride the distance between tokens
  GemmProblem product{};
  int64_t a_slot_stride = 0;  // elements; 0 if the slots of a token share one row
  uint32_t experts = 0;
  uint32_t top_k = 1;
  bool wide_ids = true;  // int64, otherwise int32
  ElementType row_weights = ElementType::float32;
  bool has_row_weights = false;
  bool reduce = false;
  // A gated activation that the products need next. plan_moe includes it where one dispatch can compute both.
  std::optional<MoeGate> gate{};
};

inline uint32_t token_count(const MoeProblem& problem) {
  return problem.product.M / problem.top_k;
}

// Returns the rows of each expert that has any, if the router spreads the pairs evenly.
inline uint32_t rows_of_expert(const MoeProblem& problem) {
  return ceil_divide(problem.product.M, std::min(problem.experts, problem.product.M));
}

struct DequantizeProblem {
  WeightProblem weight{};
  ElementType out = ElementType::float16;
};

struct EmbeddingProblem {
  WeightProblem weight{};
  uint32_t count = 0;    // ids
  bool wide_ids = true;  // int64, otherwise int32
  ElementType out = ElementType::float16;
};

struct RepackProblem {
  Kernel kernel = Kernel::gptq_repack;  // one of the kernels in weights/repack.metal
  uint32_t rows = 0;                    // rows and columns of the kernel's grid, see variants.h
  uint32_t columns = 0;
  bool has_perm = false;
  StoredZeros stored_zeros = StoredZeros::plain;
};

}  // namespace marlin
