// fused: strips of 32 columns by 8 to 32 rows, K split over simdgroups first and over threadgroups where those are not
// enough. Rows that do not fill a block are padded, or a second dispatch's with the smallest block that holds them.
#include "plan_parts.h"
#include "plan_split.h"

namespace marlin {

namespace {

// Threadgroups of two simdgroups have been measured at two thirds of the matrix rate of larger ones (M1).
constexpr uint32_t kFewestSlices = 4;
// Shorter slices spend more on their ends than they win.
constexpr uint32_t kShortestSlice = 2 * kFusedK;

// Row blocks of one size, from row m_begin on.
struct RowBlocks {
  uint32_t m_begin, rows, count;
};

std::vector<RowBlocks> padded(uint32_t M, uint32_t rows) {
  return {{0, rows, ceil_divide(M, rows)}};
}

std::vector<RowBlocks> with_rest(uint32_t M, uint32_t rows) {
  const uint32_t rest = M % rows;
  return {{0, rows, M / rows}, {M - rest, round_up(rest, 8), 1}};
}

bool fills_blocks(uint32_t M, uint32_t rows) {
  return round_up(M, 8) % rows == 0;
}

Candidate plan_fused(const GemmProblem& problem, const GpuDevice& device, std::span<const RowBlocks> row_blocks,
                     uint32_t slices) {
  const uint32_t N = problem.weight.N;
  const uint32_t K = problem.weight.K;
  const WeightFormat format = problem.weight.format;

  const uint32_t rows = row_blocks.front().rows;
  uint32_t most_simdgroups = kFusedMaxSimdgroups;
  while (fused_threadgroup_bytes(format, rows, most_simdgroups) > kPreferredThreadgroupBytes)
    --most_simdgroups;
  const uint32_t k_per_slice = round_up(ceil_divide(K, slices), kFusedK);
  const uint32_t filled = ceil_divide(K, k_per_slice);
  const uint32_t splits = ceil_divide(filled, most_simdgroups);
  const uint32_t simdgroups = ceil_divide(filled, splits);
  const uint32_t group = group_size(problem.weight);

  Plan plan;
  for (const RowBlocks& blocks : row_blocks) {
    GemmParams params = gemm_params(problem, k_per_slice);
    params.m_begin = blocks.m_begin;
    Dispatch dispatch{.kernel = Kernel::gemm_fused,
                      .function = host_name(Kernel::gemm_fused, format, problem.activations),
                      .constants = gemm_constants(problem, splits > 1),
                      .grid = {ceil_divide(N, kFusedColumns), blocks.count, splits},
                      .threads = {simdgroups * kSimdWidth, 1, 1},
                      .threadgroup_bytes = fused_threadgroup_bytes(format, blocks.rows, simdgroups),
                      .params = params};
    dispatch.constants[kConstantRows] = static_cast<int32_t>(blocks.rows);
    dispatch.constants[kConstantSubnormalCodes] = device.half_subnormals;
    dispatch.constants[kConstantShortGroupSize] = group < kFusedK && group < K ? static_cast<int32_t>(group) : 0;
    dispatch.constants[kConstantRaggedK] = K % kFusedK != 0;
    dispatch.constants[kConstantRaggedN] = N % kFusedColumns != 0;
    plan.dispatches.push_back(std::move(dispatch));
  }
  add_reduction(plan, problem, splits);
  return {.variant = "fused", .tile = {rows, kFusedColumns, kFusedK}, .plan = std::move(plan)};
}

}  // namespace

void add_fused(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t longest_split = std::clamp<uint32_t>(problem.weight.K / kShortestSlice, 1, kMostSlices);
  const uint32_t most_rows = std::min<uint32_t>(round_up(problem.M, 8), kFusedMaxRows);
  for (uint32_t rows = most_rows; rows > 0; rows -= 8) {
    const auto split = [&](const std::vector<RowBlocks>& row_blocks) {
      return cheapest_split(problem, device, std::min(kFewestSlices, longest_split), longest_split,
                            [&](uint32_t slices) { return plan_fused(problem, device, row_blocks, slices); });
    };
    const auto seconds = [&](const Candidate& candidate) { return cost(candidate, problem, device).seconds; };
    Candidate best = split(padded(problem.M, rows));
    if (!fills_blocks(problem.M, rows)) {
      Candidate other = split(with_rest(problem.M, rows));
      if (seconds(other) < seconds(best)) best = std::move(other);
    }
    candidates.push_back(std::move(best));
  }
}

}  // namespace marlin
