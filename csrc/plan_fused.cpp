// fused: strips of 32 columns by 8 to 32 rows, K split over simdgroups first and over threadgroups where the strips are
// few.
#include "plan_parts.h"

namespace marlin {

namespace {

// Simdgroups that a core's registers hold by the half-registers counted for the M1 (benchmarks/metal/instructions.py:
// 127, 159, 183 and 207 for 8, 16, 24 and 32 rows); its ALUs are busy from 24 on (metal-benchmarks).
constexpr std::array<uint32_t, kFusedMaxRows / 8 + 1> kSimdgroupsPerCore{0, 24, 20, 18, 16};
// Threadgroups of two simdgroups have been measured at two thirds of the matrix rate of larger ones (M1, agx-facts 5).
constexpr uint32_t kFewestSlices = 4;
// Slices shorter than this spend more on the reduction than they win.
constexpr uint32_t kShortestSlice = 2 * kFusedK;
// 60 KB a core hold three groups of this size.
constexpr uint32_t kThreadgroupBytes = 20 * 1024;

Plan plan_fused(const GemmProblem& problem, const GpuDevice& device, uint32_t rows) {
  const uint32_t K = problem.weight.K;
  const WeightFormat format = problem.weight.format;
  const Extent strips{ceil_divide(problem.weight.N, kFusedColumns), ceil_divide(problem.M, rows), 1};

  uint32_t most_simdgroups = kFusedMaxSimdgroups;
  while (fused_threadgroup_bytes(format, rows, most_simdgroups) > kThreadgroupBytes)
    --most_simdgroups;
  const uint64_t resident = uint64_t{strips.x} * strips.y;
  const uint64_t wanted = (uint64_t{device.cores} * kSimdgroupsPerCore[rows / 8] + resident - 1) / resident;
  const uint32_t longest_split = std::clamp<uint32_t>(K / kShortestSlice, 1, kMostSlices);
  const auto slices =
      std::min(static_cast<uint32_t>(std::clamp<uint64_t>(wanted, kFewestSlices, kMostSlices)), longest_split);
  const uint32_t k_per_slice = round_up(ceil_divide(K, slices), kFusedK);
  const uint32_t filled = ceil_divide(K, k_per_slice);
  const uint32_t splits = ceil_divide(filled, most_simdgroups);
  const uint32_t simdgroups = ceil_divide(filled, splits);

  Dispatch dispatch{.kernel = Kernel::gemm_fused,
                    .function = host_name(Kernel::gemm_fused, format, problem.activations),
                    .constants = gemm_constants(problem, splits > 1),
                    .grid = {strips.x, strips.y, splits},
                    .threads = {simdgroups * kSimdWidth, 1, 1},
                    .threadgroup_bytes = fused_threadgroup_bytes(format, rows, simdgroups),
                    .params = gemm_params(problem, k_per_slice)};
  const uint32_t group = group_size(problem.weight);
  dispatch.constants[kConstantRows] = static_cast<int32_t>(rows);
  dispatch.constants[kConstantSubnormalCodes] = device.half_subnormals;
  dispatch.constants[kConstantShortGroupSize] = group < kFusedK && group < K ? static_cast<int32_t>(group) : 0;
  dispatch.constants[kConstantRaggedK] = K % kFusedK != 0;
  dispatch.constants[kConstantRaggedN] = problem.weight.N % kFusedColumns != 0;
  Plan plan{.dispatches = {std::move(dispatch)}};
  add_reduction(plan, problem, splits);
  return plan;
}

}  // namespace

// The row blocks that waste least first, then the smaller ones.
void add_fused(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t even = ceil_divide(problem.M, ceil_divide(problem.M, kFusedMaxRows));
  for (uint32_t rows = round_up(even, 8); rows > 0; rows -= 8) {
    candidates.push_back(
        {.variant = "fused", .tile = {rows, kFusedColumns, kFusedK}, .plan = plan_fused(problem, device, rows)});
  }
}

}  // namespace marlin
