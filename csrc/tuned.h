// What a tuner measured to be the fastest way of computing a product, in place of the model's answer.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan.h"

namespace marlin {

// A product with any number of rows from first_M to last_M, both included.
struct TunedRange {
  WeightFormat format;
  ElementType activations;
  uint32_t group_size;
  uint32_t K;
  uint32_t N;
  uint32_t first_M;
  uint32_t last_M;
  std::string variant;  // a candidate's name: "gemv", "double_buffered:128x64x16"
};

// Takes the place of all earlier ranges; of ranges that overlap, the earlier one counts. Safe to call from any thread.
// Throws std::invalid_argument for a name that begins with no variant's.
void set_tuned(std::vector<TunedRange> ranges);

// The variant for a product, or an empty text. It lives as long as the process.
std::string_view tuned_variant(const GemmProblem& problem);

}  // namespace marlin
