// The launch planner: what to compute and on which GPU -> which kernels to dispatch, with what grid, constants and
// threadgroup memory. Pure C++: no torch, no Metal.
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <variant>
#include <vector>

#include "csrc/planner/device.h"
#include "csrc/planner/problem.h"
#include "csrc/planner/tiling.h"
#include "kernels/shared/variants.h"

namespace marlin {

using FunctionConstants = std::array<int32_t, kFunctionConstantCount>;
using KernelParams = std::variant<std::monostate, GemmParams, DequantizeParams, ReduceParams, StripedReduceParams,
                                  RepackParams, MlstmParams>;

struct Dispatch {
  Kernel kernel;
  std::string function;  // host name in its library
  FunctionConstants constants{};
  Extent grid{};     // threadgroups
  Extent threads{};  // of a threadgroup
  uint32_t threadgroup_bytes = 0;
  KernelParams params{};
};

struct Plan {
  std::vector<Dispatch> dispatches;  // in order, each may read what the one before wrote
  Extent partials{0, 0, 0};          // [z, y, x] floats of workspace, see kSlotPartials; all zero: none
  // two_pass: the dispatches write the weight in the activations' type, [K, N], for a dense product after them.
  bool dense_product = false;
};

Plan build_plan(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device);

// Each throws std::invalid_argument, in the operators' form, for a problem that no kernel can take.
// Ranks the tilings and builds the plan of the chosen one only.
Plan plan_gemm(const GemmProblem& problem, const GpuDevice& device);
Plan plan_dequantize(const DequantizeProblem& problem);
Plan plan_repack(const RepackProblem& problem);
Plan plan_probe();

std::ostream& operator<<(std::ostream& stream, const Dispatch& dispatch);
std::ostream& operator<<(std::ostream& stream, const Plan& plan);

// With TORCH_MARLIN_METAL_PRINT_PLAN=1: prints each distinct plan once, to stderr.
void print_plan_once(const Plan& plan);

}  // namespace marlin
