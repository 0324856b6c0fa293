#include "csrc/experts/cpu/moe_gemm.h"

// Products with the weights of experts. Sorts the pairs of a token and a slot by expert, computes one product for each
// expert that has pairs, and combines the products of each token.
#include <algorithm>
#include <cstring>
#include <vector>

#include "csrc/core/math.h"
#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/scratch.h"

namespace marlin::cpu {

namespace {

constexpr int64_t kCombineGrain = int64_t{1} << 15;  // products per task; their sum takes about 10 us

const void* at_element(const void* data, ElementType type, int64_t index) {
  return data == nullptr ? nullptr : element_at(data, type, index);
}

PackedWeight weight_of(const MoeGemmArguments& arguments, int64_t expert) {
  PackedWeight weight = arguments.weight;
  const int64_t scales = ceil_divide(weight.K, weight.group_size) * weight.N;
  weight.words += expert * (weight.K / codes_per_word(weight.format)) * weight.N;
  if (weight.high != nullptr)
    weight.high += expert * ceil_divide(weight.K, int64_t{k_per_high_word(high_bits(weight.format))}) * weight.N;
  weight.scales =
      at_element(weight.scales, weight.scales_type, expert * (weight.block_scales ? scales / kScaleBlock : scales));
  weight.zeros = at_element(weight.zeros, weight.zeros_type, expert * scales);
  const int64_t supers = ceil_divide(weight.K, kSuperBlock) * weight.N;
  weight.super_scales = at_element(weight.super_scales, weight.super_type, expert * supers);
  weight.super_zeros = at_element(weight.super_zeros, weight.super_type, expert * supers);
  if (weight.global_scale != nullptr) weight.global_scale += expert * arguments.global_scale_expert_stride;
  return weight;
}

// The pairs sorted by expert. Pairs of one expert keep their order.
struct SortedPairs {
  std::vector<int64_t> ends;      // [experts]: the index after each expert's last pair in the two lists below
  std::vector<int64_t> a_starts;  // the first element of each pair's row in `a`
  std::vector<int64_t> pairs;

  explicit SortedPairs(const MoeGemmArguments& arguments) : ends(static_cast<size_t>(arguments.experts)) {
    const int64_t count = arguments.tokens * arguments.top_k;
    for (int64_t pair = 0; pair < count; ++pair) {
      if (is_expert(arguments, pair)) ++ends[expert(arguments, pair)];
    }
    int64_t total = 0;
    // Here `end` becomes the start of each expert's pairs. The loop that fills the lists moves it to the end.
    for (int64_t& end : ends) {
      const int64_t rows = end;
      end = total;
      total += rows;
    }
    a_starts.resize(static_cast<size_t>(total));
    pairs.resize(static_cast<size_t>(total));
    for (int64_t pair = 0; pair < count; ++pair) {
      if (!is_expert(arguments, pair)) continue;
      const auto place = static_cast<size_t>(ends[expert(arguments, pair)]++);
      pairs[place] = pair;
      a_starts[place] =
          pair / arguments.top_k * arguments.a_token_stride + pair % arguments.top_k * arguments.a_slot_stride;
    }
  }

  static size_t expert(const MoeGemmArguments& arguments, int64_t pair) {
    return static_cast<size_t>(arguments.expert_ids[pair]);
  }
  static bool is_expert(const MoeGemmArguments& arguments, int64_t pair) {
    return arguments.expert_ids[pair] >= 0 && arguments.expert_ids[pair] < arguments.experts;
  }
};

std::vector<GemmArguments> products_of(const MoeGemmArguments& arguments, const SortedPairs& sorted, void* out,
                                       bool fp32_out) {
  std::vector<GemmArguments> products;
  int64_t begin = 0;
  for (int64_t expert = 0; expert < arguments.experts; ++expert) {
    const int64_t end = sorted.ends[static_cast<size_t>(expert)];
    if (end == begin) continue;
    products.push_back({.weight = weight_of(arguments, expert),
                        .M = end - begin,
                        .a = arguments.a,
                        .a_type = arguments.a_type,
                        .a_row_stride = 0,
                        .perm = arguments.perm == nullptr ? nullptr : arguments.perm + expert * arguments.weight.K,
                        .bias = at_element(arguments.bias, arguments.bias_type, expert * arguments.weight.N),
                        .bias_type = arguments.bias_type,
                        .out = out,
                        .a_starts = sorted.a_starts.data() + begin,
                        .out_rows = sorted.pairs.data() + begin,
                        .fp32_out = fp32_out});
    begin = end;
  }
  return products;
}

// Multiplies the fp32 product of each pair by its row weight. With `reduce`, adds up the weighted products of each
// token.
void combine(const MoeGemmArguments& arguments, const KernelSet& kernels, const float* products,
             const Parallel& parallel) {
  const int64_t N = arguments.weight.N;
  const int64_t terms = arguments.reduce ? arguments.top_k : 1;
  const int64_t rows = arguments.tokens * arguments.top_k / terms;
  parallel.run(rows, std::max<int64_t>(1, kCombineGrain / (terms * N)), [&](int64_t begin, int64_t end) {
    static thread_local Scratch sum_scratch;
    auto* sum = sum_scratch.get<float>(N);
    for (int64_t row = begin; row < end; ++row) {
      std::fill_n(sum, N, 0.F);
      for (int64_t pair = row * terms; pair < (row + 1) * terms; ++pair) {
        if (!SortedPairs::is_expert(arguments, pair)) continue;
        const float weight = arguments.row_weights == nullptr
                                 ? 1.F
                                 : load_element(arguments.row_weights, arguments.row_weights_type, pair);
        const float* product = products + pair * N;
        for (int64_t n = 0; n < N; ++n)
          sum[n] += weight * product[n];
      }
      kernels.from_float(sum, arguments.a_type, N, element_at(arguments.out, arguments.a_type, row * N));
    }
  });
}

}  // namespace

void moe_gemm_on(const Machine& machine, const MoeGemmArguments& arguments, const Parallel& parallel,
                 Precision precision) {
  static thread_local Scratch product_scratch;
  const SortedPairs sorted(arguments);
  const int64_t N = arguments.weight.N;
  const int64_t count = arguments.tokens * arguments.top_k;
  if (arguments.reduce || arguments.row_weights != nullptr) {
    auto* products = product_scratch.get<float>(count * N);
    gemm_group_on(machine, products_of(arguments, sorted, products, true), parallel, precision);
    combine(arguments, *kernels_of(machine.isa), products, parallel);
    product_scratch.trim(kKeepBytes);
    return;
  }
  const int64_t row_bytes = N * element_bytes(arguments.a_type);
  for (int64_t pair = 0; pair < count; ++pair) {
    if (SortedPairs::is_expert(arguments, pair)) continue;
    std::memset(static_cast<char*>(arguments.out) + pair * row_bytes, 0, static_cast<size_t>(row_bytes));
  }
  gemm_group_on(machine, products_of(arguments, sorted, arguments.out, false), parallel, precision);
}

void moe_gemm(const MoeGemmArguments& arguments, const Parallel& parallel, Precision precision) {
  moe_gemm_on(this_machine(parallel), arguments, parallel, precision);
}

}  // namespace marlin::cpu
