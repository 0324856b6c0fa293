// gemv: strips of 128 columns, K split over simdgroups first and over threadgroups where the strips are few.
#include "plan_parts.h"

namespace marlin {

namespace {

// An Apple GPU core keeps its ALUs busy from 24 resident simdgroups on (metal-benchmarks, M1 Max).
constexpr uint32_t kSimdgroupsPerCore = 24;
// Slices shorter than this spend more on the reduction than they win.
constexpr uint32_t kShortestSlice = 64;
// 60 KB a core hold three groups of this size, of 8 simdgroups each at four rows.
constexpr uint32_t kThreadgroupBytes = 20 * 1024;

}  // namespace

void add_gemv(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t M = problem.M;
  const uint32_t N = problem.weight.N;
  const uint32_t K = problem.weight.K;
  const uint32_t rows = std::min<uint32_t>(ceil_divide(M, ceil_divide(M, kGemvMaxRows)), kGemvMaxRows);
  const Extent strips{ceil_divide(N, kGemvColumns), ceil_divide(M, rows), 1};

  const uint64_t resident = uint64_t{strips.x} * strips.y;
  const uint64_t wanted = (uint64_t{device.cores} * kSimdgroupsPerCore + resident - 1) / resident;
  const uint32_t longest_split = std::clamp<uint32_t>(K / kShortestSlice, 1, kMostSlices);
  const auto slices = static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, longest_split));
  const uint32_t k_per_slice = slice_length(problem, slices, kGemvK);
  const uint32_t filled = ceil_divide(K, k_per_slice);

  uint32_t simdgroups = std::min<uint32_t>(filled, kGemvMaxSimdgroups);
  while (gemv_threadgroup_bytes(rows, simdgroups) > kThreadgroupBytes)
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
  dispatch.constants[kConstantRaggedK] = K % kGemvK != 0;
  dispatch.constants[kConstantRaggedN] = N % kGemvColumns != 0;
  // A code scaled down by 2^24 takes small bf16 and fp32 activations below fp32's range; fp16 ones stay inside.
  dispatch.constants[kConstantSubnormalCodes] = device.half_subnormals && problem.activations == ElementType::float16;
  Plan plan{.dispatches = {std::move(dispatch)}};
  add_reduction(plan, problem, splits);
  candidates.push_back({.variant = "gemv", .tile = {rows, kGemvColumns, kGemvK}, .plan = std::move(plan)});
}

}  // namespace marlin
