// The launch planner. For a problem and a GPU, it decides which kernels to dispatch, with which grid, constants and
// threadgroup memory. It uses neither torch nor Metal.
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <variant>
#include <vector>

#include "csrc/planner/device.h"
#include "csrc/planner/problem.h"
#include "csrc/planner/tiling.h"
#include "kernels/shared/kernel_list.h"

namespace marlin {

using FunctionConstants = std::array<int32_t, kFunctionConstantCount>;
using KernelParams = std::variant<std::monostate, GemmParams, DequantizeParams, EmbeddingParams, ReduceParams,
                                  StripedReduceParams, RepackParams, MoeParams, MoeReduceParams, NormParams,
                                  RotaryParams, ActivationParams, CacheParams, MlstmParams>;

struct Dispatch {
  KernelInstance instance;
  FunctionConstants constants{};
  Extent grid{};     // in threadgroups
  Extent threads{};  // per threadgroup
  uint32_t threadgroup_bytes = 0;
  KernelParams params{};
  double seconds = 0;  // predicted time on the GPU
};

struct Plan {
  std::vector<Dispatch> dispatches;  // in order; a dispatch may read what earlier ones wrote
  Extent partials{0, 0, 0};          // [z, y, x] floats of workspace for kSlotPartials; all zero if there is none
  uint32_t block_words = 0;          // words of workspace for kSlotBlocks
  // True for two_pass: the dispatches write the decoded weight as [K, N] in the activations' type, and the caller
  // multiplies.
  bool dense_product = false;
  bool applies_gate = false;  // true if the dispatches compute the problem's gated activation, too
};

// Returns the sum of the predicted GPU times of all dispatches.
double seconds(const Plan& plan);
void set_seconds(Plan& plan, const struct Estimate& estimate);

Plan build_plan(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device);

// The functions below throw std::invalid_argument if no kernel can compute the problem. refuse() in variants.h shows
// the text of the error. plan_gemm ranks all tilings, but builds a plan for the chosen tiling only.
Plan plan_gemm(const GemmProblem& problem, const GpuDevice& device);
Plan plan_dequantize(const DequantizeProblem& problem, const GpuDevice& device);
std::ostream& operator<<(std::ostream& stream, const Dispatch& dispatch);
std::ostream& operator<<(std::ostream& stream, const Plan& plan);

// If TORCH_MARLIN_METAL_PRINT_PLAN is 1, prints each distinct plan once, to stderr.
void print_plan_once(const Plan& plan);

}  // namespace marlin
