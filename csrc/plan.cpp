#include "plan.h"

#include <algorithm>
#include <stdexcept>

namespace marlin {

namespace {

constexpr std::array<std::string_view, 3> kGemmVariants{"gemv", "double_buffered", "single_stage"};

// An Apple GPU core keeps its ALUs busy from 24 resident simdgroups on (metal-benchmarks, M1 Max).
constexpr uint32_t kSimdgroupsPerCore = 24;
// Two tiles a core fit its 60 KB of threadgroup memory with the largest stage, and hide each other's barriers.
constexpr uint32_t kTilesPerCore = 2;
// Slices shorter than this spend more on the reduction than they win.
constexpr uint32_t kShortestGemvSlice = 64;
constexpr uint32_t kShortestTileSlice = 256;
constexpr uint32_t kMostSlices = 64;
// 60 KB a core hold three groups of this size, of 8 simdgroups each at four rows.
constexpr uint32_t kGemvThreadgroupBytes = 20 * 1024;
// Instructions for a weight and lane by the count for the M1 (6.5 of gemv at 4 rows and as much again for reading the
// weights another time; 83 of a 64-row tile): six row blocks of gemv cost what one row of tiles costs.
constexpr uint32_t kGemvMostRowBlocks = 6;

uint32_t round_up(uint32_t value, uint32_t multiple) {
  return ceil_divide(value, multiple) * multiple;
}

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

uint32_t group_size(const WeightProblem& weight) {
  return std::min(weight.group_size, weight.K);
}

void check(const WeightProblem& weight) {
  require(weight.N > 0 && weight.K > 0 && weight.K % kCodesPerWord == 0, "plan: N and K / 8 must be positive");
  require(weight.group_size > 0 && group_size(weight) % kCodesPerWord == 0, "plan: group_size must be a multiple of 8");
}

FunctionConstants weight_constants(const WeightProblem& weight) {
  FunctionConstants constants{};
  constants[kConstantHasPerm] = weight.has_perm;
  constants[kConstantHasGlobalScale] = weight.has_global_scale;
  constants[kConstantGlobalScalePerColumn] = weight.has_global_scale && weight.global_scale_per_column;
  constants[kConstantScalesType] = static_cast<int32_t>(weight.scales);
  constants[kConstantZerosType] = static_cast<int32_t>(weight.zeros);
  constants[kConstantVectorColumns] = weight.vector_aligned && weight.N % 4 == 0;
  return constants;
}

FunctionConstants gemm_constants(const GemmProblem& problem, bool writes_partials) {
  FunctionConstants constants = weight_constants(problem.weight);
  constants[kConstantHasBias] = problem.has_bias && !writes_partials;
  constants[kConstantBiasType] = constants[kConstantHasBias] != 0 ? static_cast<int32_t>(problem.bias) : 0;
  constants[kConstantVectorActivations] =
      !problem.weight.has_perm && problem.vector_aligned_a && problem.a_row_stride % 4 == 0;
  constants[kConstantWritesPartials] = writes_partials;
  return constants;
}

// About `wanted` slices of K, none empty, that start where a group or an even part of one starts if `unit` allows.
uint32_t slice_length(const GemmProblem& problem, uint32_t wanted, uint32_t unit) {
  const uint32_t group = group_size(problem.weight);
  const uint32_t even = round_up(ceil_divide(problem.weight.K, wanted), unit);
  if (even < group) return round_up(group / (group / even), unit);
  return group % unit == 0 ? round_up(even, group) : even;
}

GemmParams gemm_params(const GemmProblem& problem, uint32_t k_per_slice) {
  return {problem.a_row_stride, problem.M, problem.weight.N, problem.weight.K, group_size(problem.weight),
          k_per_slice,          0};
}

Extent elementwise_grid(uint32_t columns, uint32_t rows) {
  return {ceil_divide(columns, kElementwiseWidth), ceil_divide(rows, kElementwiseHeight), 1};
}

constexpr Extent kElementwiseThreads{kElementwiseWidth, kElementwiseHeight, 1};

void add_reduction(Plan& plan, const GemmProblem& problem, uint32_t slices) {
  if (slices == 1) return;
  plan.partials = {problem.weight.N, problem.M, slices};
  Dispatch dispatch{.kernel = Kernel::reduce,
                    .function = host_name(Kernel::reduce, problem.weight.format, problem.activations),
                    .grid = elementwise_grid(problem.weight.N, problem.M),
                    .threads = kElementwiseThreads,
                    .params = ReduceParams{problem.M, problem.weight.N, slices, 0}};
  dispatch.constants[kConstantHasBias] = problem.has_bias;
  dispatch.constants[kConstantBiasType] = problem.has_bias ? static_cast<int32_t>(problem.bias) : 0;
  plan.dispatches.push_back(std::move(dispatch));
}

Plan plan_gemv(const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t M = problem.M;
  const uint32_t N = problem.weight.N;
  const uint32_t K = problem.weight.K;
  const uint32_t rows = std::min<uint32_t>(ceil_divide(M, ceil_divide(M, kGemvMaxRows)), kGemvMaxRows);
  const Extent strips{ceil_divide(N, kGemvColumns), ceil_divide(M, rows), 1};

  const uint64_t resident = uint64_t{strips.x} * strips.y;
  const uint64_t wanted = (uint64_t{device.cores} * kSimdgroupsPerCore + resident - 1) / resident;
  const uint32_t longest_split = std::clamp<uint32_t>(K / kShortestGemvSlice, 1, kMostSlices);
  const auto slices = static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, longest_split));
  const uint32_t k_per_slice = slice_length(problem, slices, kCodesPerWord);
  const uint32_t filled = ceil_divide(K, k_per_slice);

  uint32_t simdgroups = std::min<uint32_t>(filled, kGemvMaxSimdgroups);
  while (gemv_threadgroup_bytes(rows, simdgroups) > kGemvThreadgroupBytes)
    --simdgroups;
  const uint32_t splits = ceil_divide(filled, simdgroups);
  simdgroups = ceil_divide(filled, splits);

  Dispatch dispatch{.kernel = Kernel::gemv,
                    .function = host_name(Kernel::gemv, problem.weight.format, problem.activations),
                    .constants = gemm_constants(problem, splits > 1),
                    .grid = {strips.x, strips.y, splits},
                    .threads = {simdgroups * kSimdWidth, 1, 1},
                    .threadgroup_bytes = gemv_threadgroup_bytes(rows, simdgroups),
                    .params = gemm_params(problem, k_per_slice)};
  dispatch.constants[kConstantRows] = static_cast<int32_t>(rows);
  // A code scaled down by 2^24 takes small bf16 and fp32 activations below fp32's range; fp16 ones stay inside.
  dispatch.constants[kConstantSubnormalCodes] = device.half_subnormals && problem.activations == ElementType::float16;
  Plan plan{.dispatches = {std::move(dispatch)}};
  add_reduction(plan, problem, splits);
  return plan;
}

Plan plan_tiles(const GemmProblem& problem, const GpuDevice& device, Kernel kernel) {
  const uint32_t stages = kernel == Kernel::gemm_double_buffered ? 2 : 1;
  const Extent tiles{ceil_divide(problem.weight.N, kTileN), ceil_divide(problem.M, kTileM), 1};

  const uint64_t count = uint64_t{tiles.x} * tiles.y;
  const uint64_t wanted = (uint64_t{device.cores} * kTilesPerCore + count - 1) / count;
  const uint32_t longest_split = std::clamp<uint32_t>(problem.weight.K / kShortestTileSlice, 1, kMostSlices);
  const uint32_t k_per_slice =
      slice_length(problem, static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, longest_split)), kTileK);
  const uint32_t slices = ceil_divide(problem.weight.K, k_per_slice);

  Plan plan{.dispatches = {{.kernel = kernel,
                            .function = host_name(kernel, problem.weight.format, problem.activations),
                            .constants = gemm_constants(problem, slices > 1),
                            .grid = {tiles.x, tiles.y, slices},
                            .threads = {kTileThreads, 1, 1},
                            .threadgroup_bytes = tile_threadgroup_bytes(problem.activations, stages),
                            .params = gemm_params(problem, k_per_slice)}}};
  add_reduction(plan, problem, slices);
  return plan;
}

std::string_view choose_variant(const GemmProblem& problem) {
  return ceil_divide(problem.M, kGemvMaxRows) <= kGemvMostRowBlocks ? "gemv" : "double_buffered";
}

}  // namespace

std::span<const std::string_view> gemm_variants() {
  return kGemmVariants;
}

Plan plan_gemm(const GemmProblem& problem, const GpuDevice& device) {
  require(problem.M > 0, "plan: M must be positive");
  check(problem.weight);
  const std::string_view variant = problem.variant == "auto" ? choose_variant(problem) : problem.variant;
  if (variant == "gemv") return plan_gemv(problem, device);
  if (variant == "double_buffered") return plan_tiles(problem, device, Kernel::gemm_double_buffered);
  if (variant == "single_stage") return plan_tiles(problem, device, Kernel::gemm_single_stage);
  throw std::invalid_argument("plan: no kernel variant '" + std::string(variant) + "'");
}

Plan plan_dequantize(const DequantizeProblem& problem) {
  const WeightProblem& weight = problem.weight;
  check(weight);
  return {.dispatches = {{.kernel = Kernel::dequantize,
                          .function = host_name(Kernel::dequantize, weight.format, problem.out),
                          .constants = weight_constants(weight),
                          .grid = elementwise_grid(weight.N, weight.K / kCodesPerWord),
                          .threads = kElementwiseThreads,
                          .params = DequantizeParams{weight.N, weight.K, group_size(weight), 0}}}};
}

Plan plan_repack(const RepackProblem& problem) {
  require(problem.rows > 0 && problem.columns > 0, "plan: rows and columns must be positive");
  require(info(problem.kernel).library == "repack", "plan: not a kernel of the library repack");
  Dispatch dispatch{
      .kernel = problem.kernel,
      .function = host_name(problem.kernel, WeightFormat::uint4b8, ElementType::float16),
      .grid = elementwise_grid(problem.columns, problem.rows),
      .threads = kElementwiseThreads,
      .params = RepackParams{problem.rows, problem.columns, static_cast<int32_t>(problem.stored_zeros), 0}};
  dispatch.constants[kConstantHasPerm] = problem.has_perm;
  return {.dispatches = {std::move(dispatch)}};
}

Plan plan_probe() {
  return {.dispatches = {{.kernel = Kernel::probe_half_subnormals,
                          .function = std::string(info(Kernel::probe_half_subnormals).name)}}};
}

}  // namespace marlin
