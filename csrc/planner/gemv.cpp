// gemv: strips of 128 columns, K split over simdgroups first and over threadgroups where those are not enough.
#include "plan_parts.h"
#include "plan_split.h"

namespace marlin {

namespace {

// Shorter slices spend more on their ends than they win.
constexpr uint32_t kShortestSlice = 64;
// In two blocks. With more rows fused costs as little by the model, and gemv is planned where it is asked for by name.
constexpr uint32_t kMostRows = 12;

Candidate plan_gemv(const GemmProblem& problem, const GpuDevice& device, uint32_t rows, uint32_t slices) {
  const uint32_t N = problem.weight.N;
  const uint32_t K = problem.weight.K;
  const uint32_t k_per_slice = slice_length(problem, slices, kGemvK);
  const uint32_t filled = ceil_divide(K, k_per_slice);

  uint32_t simdgroups = std::min<uint32_t>(filled, kGemvMaxSimdgroups);
  const WeightFormat format = problem.weight.format;
  while (gemv_threadgroup_bytes(format, rows, simdgroups) > kPreferredThreadgroupBytes)
    --simdgroups;
  const uint32_t splits = ceil_divide(filled, simdgroups);
  simdgroups = ceil_divide(filled, splits);

  Dispatch dispatch{.kernel = Kernel::gemv,
                    .function = host_name(Kernel::gemv, format, problem.activations),
                    .constants = gemm_constants(problem, splits > 1),
                    .grid = {ceil_divide(problem.M, rows), ceil_divide(N, kGemvColumns), splits},
                    .threads = {simdgroups * kSimdWidth, 1, 1},
                    .threadgroup_bytes = gemv_threadgroup_bytes(format, rows, simdgroups),
                    .params = gemm_params(problem, k_per_slice)};
  dispatch.constants[kConstantRows] = static_cast<int32_t>(rows);
  dispatch.constants[kConstantSubnormalCodes] = device.half_subnormals;
  dispatch.constants[kConstantRaggedK] = K % kGemvK != 0;
  dispatch.constants[kConstantRaggedN] = N % kGemvColumns != 0;
  Plan plan{.dispatches = {std::move(dispatch)}};
  add_reduction(plan, problem, splits);
  return {.variant = "gemv", .tile = {rows, kGemvColumns, kGemvK}, .plan = std::move(plan)};
}

}  // namespace

// Larger blocks than the rows need are there too: a block may have more simdgroups than the next smaller one.
void add_gemv(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t blocks = ceil_divide(problem.M, kGemvMaxRows);
  if (problem.M > kMostRows && problem.variant == "auto") return;
  const uint32_t most = std::clamp<uint32_t>(problem.weight.K / kShortestSlice, 1, kMostSlices);
  for (uint32_t rows = ceil_divide(problem.M, blocks); rows <= kGemvMaxRows; ++rows) {
    candidates.push_back(cheapest_split(problem, device, 1, most,
                                        [&](uint32_t slices) { return plan_gemv(problem, device, rows, slices); }));
  }
}

}  // namespace marlin
