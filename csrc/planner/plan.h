// The launch planner: what to compute and on which GPU -> which kernels to dispatch, with what grid, constants and
// threadgroup memory. Pure C++: no torch, no Metal.
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "../kernels/variants.h"
#include "gpu_device.h"

namespace marlin {

struct WeightProblem {
  WeightFormat format = WeightFormat::uint4b8;
  uint32_t K = 0;
  uint32_t N = 0;
  uint32_t group_size = 0;  // larger than K: K
  ElementType scales = ElementType::float16;
  ElementType zeros = ElementType::float16;  // any where the format has none
  bool has_perm = false;
  bool has_global_scale = false;
  bool global_scale_per_column = false;
  bool vector_aligned = false;  // the first packed word, scale and zero point are aligned for a load of four

  auto operator<=>(const WeightProblem&) const = default;
};

struct GemmProblem {
  WeightProblem weight{};
  uint32_t M = 0;
  int64_t a_row_stride = 0;  // elements
  ElementType activations = ElementType::float16;
  ElementType bias = ElementType::float16;
  bool has_bias = false;
  bool vector_aligned_a = false;  // the first activation is aligned for a load of four
  // auto, one of gemm_variants(), or one of them and a tile: "double_buffered:128x64x16"
  std::string_view variant = "auto";
  // What a tuner measured to be best for auto, named in the same way; empty: it says nothing.
  std::string_view tuned{};

  auto operator<=>(const GemmProblem&) const = default;
};

struct DequantizeProblem {
  WeightProblem weight{};
  ElementType out = ElementType::float16;
};

struct RepackProblem {
  Kernel kernel = Kernel::gptq_repack;  // of the library repack
  uint32_t rows = 0;                    // of its grid, see variants.h
  uint32_t columns = 0;
  bool has_perm = false;
  StoredZeros stored_zeros = StoredZeros::plain;
};

struct Extent {
  uint32_t x = 1, y = 1, z = 1;
};

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
  // two_pass: kSlotOut of the dispatches is the weight in the activations' type, [K, N], for a dense product after them
  bool dense_product = false;
};

// One way of computing a product.
struct Candidate {
  std::string_view variant;  // of gemm_variants()
  TileShape tile{};          // outputs of a threadgroup, and k that it takes at a step; {0, 0, 0} for two_pass
  Plan plan;
};

// The named variants, best-known first; "auto" is not among them.
std::span<const std::string_view> gemm_variants();

// Whether GemmProblem::variant may be this for such activations. That fewer rows than a tile's leave it out of a
// problem's candidates is for the problem to say.
bool is_gemm_variant(std::string_view variant, ElementType activations);

// "double_buffered:128x64x16": what GemmProblem::variant takes for this candidate's variant and tile.
std::string name(const Candidate& candidate);

// Why no plan can have this tile in so many stages of threadgroup memory; empty where one can.
std::string tile_refusal(TileShape tile, ElementType activations, uint32_t stages);

// Each throws std::invalid_argument for a problem that no kernel can take (an empty one, an unknown variant).
// All ways of computing a product: with variant "auto" those of all variants, else those of the one, or of its tile.
std::vector<Candidate> gemm_candidates(const GemmProblem& problem, const GpuDevice& device);
// One of the candidates for the problem.
const Candidate& choose(std::span<const Candidate> candidates, const GemmProblem& problem, const GpuDevice& device);
Plan plan_gemm(const GemmProblem& problem, const GpuDevice& device);
Plan plan_dequantize(const DequantizeProblem& problem);
Plan plan_repack(const RepackProblem& problem);
Plan plan_probe();

std::ostream& operator<<(std::ostream& stream, const Dispatch& dispatch);
std::ostream& operator<<(std::ostream& stream, const Plan& plan);

// With TORCH_MARLIN_METAL_PRINT_PLAN=1: each distinct plan once, to stderr.
void print_plan_once(const Plan& plan);

}  // namespace marlin
