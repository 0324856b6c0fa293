#include "csrc/mlstm/cpu/plan.h"

#include <algorithm>

#include "csrc/core/math.h"
#include "csrc/mlstm/cpu/kernel_table.h"

namespace marlin::cpu {

namespace {

constexpr int64_t kChunkwiseMinTokens = 4;  // for fewer tokens, the recurrence is faster, because chunks must first
                                            // rearrange the state
// Chunks of 32 tokens need few operations. From DK 32, DV 32 to DK 256, DV 512, their time is within 4 % of the best
// chunk size (AMD EPYC, Zen 4, 1 MB of L2). A state that exceeds the second-level cache is read and written once for
// each chunk, so longer chunks are faster then.
constexpr int64_t kShortChunk = 32;
constexpr int64_t kLongChunk = 64;
constexpr int64_t kLargeState = (1 << 20) / sizeof(float);

// Returns the best size of the first chunk if the initial state is zero. The first chunk does not multiply queries by a
// zero state, which saves 2 DK DV operations for each of its tokens. A long first chunk therefore saves more. However,
// inside a chunk of L tokens each token costs (DK + DV) L operations.
int64_t best_first_chunk(const MlstmProblem& problem, int64_t chunk_size) {
  const int64_t sum = problem.DK + problem.DV;
  auto saved = [&](int64_t L) { return L * (2 * problem.DK * problem.DV - sum * (L - chunk_size)); };
  int64_t best = chunk_size;
  for (const int64_t L : kMlstmChunkSizes) {
    if (L > chunk_size && saved(L) > saved(best)) best = L;
  }
  return best;
}

}  // namespace

MlstmPlan make_mlstm_plan(const Machine& machine, const MlstmProblem& problem, bool wide) {
  MlstmPlan plan{};
  const MlstmKernels& kernels = *mlstm_kernels_of(machine.isa);
  plan.isa = machine.isa;
  plan.strip = kernels.strip;
  plan.max_rows = kernels.max_rows;
  plan.form = wide || problem.S < kChunkwiseMinTokens ? MlstmForm::sequential : MlstmForm::chunkwise;
  plan.chunk_size = problem.chunk_size != 0                 ? problem.chunk_size
                    : problem.DK * problem.DV > kLargeState ? kLongChunk
                                                            : kShortChunk;
  plan.first_chunk = problem.chunk_size != 0 ? problem.chunk_size : best_first_chunk(problem, plan.chunk_size);
  const int64_t heads = std::max<int64_t>(problem.B * problem.H, 1);
  const int64_t strips = ceil_divide(problem.DV, plan.strip);
  plan.column_tasks = std::clamp<int64_t>(machine.threads / heads, 1, strips);
  return plan;
}

std::string to_string(const MlstmPlan& plan) {
  return std::string(plan.form == MlstmForm::sequential ? "sequential" : "chunkwise") +
         " chunk_size=" + std::to_string(plan.chunk_size) + " first_chunk=" + std::to_string(plan.first_chunk) +
         " strip=" + std::to_string(plan.strip) + " column_tasks=" + std::to_string(plan.column_tasks);
}

}  // namespace marlin::cpu
