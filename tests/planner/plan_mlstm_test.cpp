// Tests that the plans of the mLSTM operators compute every chunk once and stay within Metal's limits.
#include <random>

#include "csrc/mlstm/gpu_plan.h"
#include "csrc/planner/commit_policy.h"
#include "csrc/planner/rates.h"
#include "plan_checks.h"

using namespace marlin;

namespace {

MlstmStrides contiguous(int64_t H, int64_t S, int64_t D) {
  return {H * S * D, S * D, D};
}

MlstmLaunch launch(int64_t B, int64_t H, int64_t S, int64_t DK, int64_t DV, int64_t chunk_size) {
  return {.sizes = {B, H, S, DK, DV, chunk_size},
          .q = contiguous(H, S, DK),
          .k = contiguous(H, S, DK),
          .v = contiguous(H, S, DV),
          .i = contiguous(H, S, 1),
          .f = contiguous(H, S, 1),
          .vector_aligned = true,
          .vector_aligned_states = true};
}

const MlstmParams& params(const Dispatch& dispatch) {
  return std::get<MlstmParams>(dispatch.params);
}

void check_dispatch(const Dispatch& dispatch, const MlstmLaunch& from, uint32_t chunk_size) {
  const MlstmParams& p = params(dispatch);
  const uint32_t simdgroups = dispatch.threads.x / kSimdWidth;
  expect(dispatch.threadgroup_bytes <= 32768 && dispatch.threadgroup_bytes % 16 == 0,
         "threadgroup memory: at most 32 KB, in units of 16 bytes");
  expect(dispatch.threads.x % kSimdWidth == 0 && dispatch.threads.x <= 1024 && simdgroups > 0,
         "threads: whole simdgroups, at most 1024");
  expect(p.heads == from.sizes.B * from.sizes.H && p.S == from.sizes.S && p.chunk_size == chunk_size,
         "sizes of the launch");
  switch (dispatch.instance.kernel) {
    case Kernel::mlstm_gates:
      expect(dispatch.grid.y == p.heads && simdgroups <= kMlstmGateSimdgroups, "gates: heads and simdgroups");
      expect(dispatch.grid.x == 1 || (p.flags & kMlstmGivenM) != 0,
             "gates: one threadgroup if chunks depend on each other");
      break;
    case Kernel::mlstm_states:
      expect(dispatch.threads.x == kMlstmStateThreads && dispatch.grid.z == p.heads, "states: threads and heads");
      expect_tiling(dispatch.grid.x, kMlstmStateTile, p.DV, "states: columns");
      expect_tiling(dispatch.grid.y, kMlstmStateTile, p.DK, "states: rows");
      break;
    case Kernel::mlstm_output:
      expect(simdgroups <= kMlstmMaxSimdgroups && dispatch.grid.z == p.heads, "output: simdgroups and heads");
      expect(dispatch.threadgroup_bytes == mlstm_output_bytes(chunk_size), "output: threadgroup memory");
      expect(dispatch.grid.y == p.segment_chunks * ceil_divide(chunk_size, kMlstmBlock), "output: blocks of queries");
      expect_tiling(dispatch.grid.x, uint64_t{kMlstmSimdColumns} * simdgroups, p.DV, "output: columns");
      break;
    default:
      expect(dispatch.instance.kernel == Kernel::mlstm_step, "an mLSTM kernel");
      expect(simdgroups <= kMlstmStepMaxSimdgroups && dispatch.grid.y == p.heads, "step: simdgroups and heads");
      expect(dispatch.threadgroup_bytes == mlstm_step_bytes(simdgroups), "step: threadgroup memory");
      expect_tiling(dispatch.grid.x, kMlstmStepColumns, p.DV, "step: columns");
  }
  const bool vectors = p.DK % 4 == 0 && p.DV % 4 == 0;
  expect(dispatch.constants[kConstantVectorColumns] == (vectors && from.vector_aligned_states),
         "vector loads of states only if they are aligned");
  expect(dispatch.seconds > kDispatchSeconds, "each dispatch has an estimated time");
  expect(dispatch.constants[kConstantVectorActivations] == 0 || (vectors && from.vector_aligned),
         "vector loads of tokens only if they are aligned");
}

// Checks that the plan runs the gates once, then states and output for segments that cover the sequence.
void check_sequence(const MlstmLaunch& from) {
  const MlstmPlan planned = plan_mlstm(from, GpuDevice{});
  const auto& dispatches = planned.plan.dispatches;
  subject = text(planned.plan);
  const std::set<uint32_t> sizes(kMlstmChunkSizes.begin(), kMlstmChunkSizes.end());
  expect(sizes.contains(planned.chunk_size), "the chunk size is one of kMlstmChunkSizes");
  expect(from.sizes.chunk_size == 0 || from.sizes.chunk_size == planned.chunk_size,
         "the chunk size is the requested one");
  expect_tiling(planned.chunks, planned.chunk_size, static_cast<uint64_t>(from.sizes.S), "chunks");
  for (const Dispatch& dispatch : dispatches)
    check_dispatch(dispatch, from, planned.chunk_size);
  expect(dispatches.size() % 2 == 1 && dispatches[0].instance.kernel == Kernel::mlstm_gates, "the gates run first");
  uint32_t next = 0;
  for (size_t i = 1; i < dispatches.size(); ++i) {
    const MlstmParams& p = params(dispatches[i]);
    expect(dispatches[i].instance.kernel == (i % 2 == 1 ? Kernel::mlstm_states : Kernel::mlstm_output),
           "states, then output");
    expect(p.first_chunk == next && p.segment_chunks > 0, "segments follow each other");
    expect(p.segment_chunks <= planned.workspace.state_slots && p.save_every == 1,
           "the workspace has room for the segment's states");
    expect(p.state_slots == planned.workspace.state_slots, "the kernel knows the workspace's slots");
    if (i % 2 == 0) next += p.segment_chunks;
  }
  expect(next == planned.chunks, "segments cover all chunks");
  const uint64_t state = uint64_t{4} * params(dispatches[0]).heads * from.sizes.DK * from.sizes.DV;
  expect(planned.workspace.state_slots == 1 || planned.workspace.state_slots * state <= (uint64_t{128} << 20),
         "the workspace has at most 128 MB, or one slot");
  expect(text(plan_mlstm(from, GpuDevice{}).plan) == subject, "a second call gives the same plan");
}

void check_random() {
  std::mt19937 random(0);
  const auto pick = [&](int64_t from, int64_t to) { return std::uniform_int_distribution(from, to)(random); };
  for (int i = 0; i < 3000; ++i) {
    const int64_t chunk = i % 3 == 0 ? 0 : kMlstmChunkSizes[static_cast<size_t>(pick(0, 4))];
    MlstmLaunch from = launch(pick(1, 4), pick(1, 16), pick(1, i % 4 == 0 ? 20000 : 300),
                              pick(1, i % 2 == 0 ? 600 : 64), pick(1, i % 5 == 0 ? 1100 : 96), chunk);
    from.vector_aligned = pick(0, 1) == 1;
    from.vector_aligned_states = pick(0, 1) == 1;
    from.element = static_cast<ElementType>(pick(0, 2));
    check_sequence(from);
    const Plan step = plan_mlstm_step(from, GpuDevice{}).plan;
    subject = text(step);
    check_dispatch(step.dispatches.at(0), from, params(step.dispatches[0]).chunk_size);
    if (chunk == 0) continue;
    const auto every = static_cast<uint32_t>(pick(1, 3));
    from.save_every = every;
    from.sizes.S = chunk * every * pick(1, 9);
    for (const MlstmPlan& planned : {plan_mlstm_states(from, GpuDevice{}), plan_mlstm_output(from, GpuDevice{})}) {
      subject = text(planned.plan);
      expect(planned.plan.dispatches.size() == 2, "two dispatches: gates, then states or output");
      for (const Dispatch& dispatch : planned.plan.dispatches)
        check_dispatch(dispatch, from, planned.chunk_size);
    }
    const MlstmParams states = params(plan_mlstm_states(from, GpuDevice{}).plan.dispatches[1]);
    expect(states.state_slots == states.chunks / every + 1 && states.save_every == every,
           "one slot for each saved state and one for the initial state");
  }
}

// The first three cases have DK and DV of xLSTM-7B. The last two have small heads.
void check_choices() {
  const struct {
    int64_t S, DK, DV;
    uint32_t chunk_size, segments;
  } rows[] = {{2048, 256, 512, 64, 1},
              {8192, 256, 512, 64, 4},
              {20, 256, 512, 32, 1},
              {512, 32, 32, 32, 1},
              {1, 64, 64, 16, 1}};
  for (const auto& row : rows) {
    const MlstmPlan planned = plan_mlstm(launch(1, 8, row.S, row.DK, row.DV, 0), GpuDevice{});
    subject = text(planned.plan);
    expect(planned.chunk_size == row.chunk_size, "expected chunk size " + std::to_string(row.chunk_size));
    expect(planned.plan.dispatches.size() == 1 + 2 * row.segments,
           "expected " + std::to_string(row.segments) + " segments");
  }
}

// Checks the predicted seconds of a long sequence on an M1, which divide it into more segments than the workspace
// does.
void check_times() {
  const auto time_of = [](const MlstmLaunch& from, size_t first, size_t last) {
    double sum = 0;
    const Plan plan = plan_mlstm(from, GpuDevice{}).plan;
    subject = text(plan);
    for (size_t i = first; i <= std::min(last, plan.dispatches.size() - 1); ++i)
      sum += plan.dispatches[i].seconds;
    return sum;
  };
  // Two segments of xLSTM-7B. States need 256 x 512 multiply-adds per token and head, at 101.7 per clock in each core.
  // The output needs as many with the state, and for each of 48 keys on average 2 x 256 for the score and 512 for
  // values.
  const double clocks = (2.0 * 256 * 512 + 48 * (256 * 2 + 512)) / 101.7;
  const double expected = 8 * 4096.0 * clocks / (8 * 1.278e9);
  expect_close(time_of(launch(1, 8, 4096, 256, 512, 0), 1, 4), expected, 0.05, "the time of 4096 tokens");
  expect_close(time_of(launch(1, 8, 4096, 256, 512, 0), 0, 0), 6e-6 + 8 * 4096.0 * (2 * 2 + 6 * 4) / (68.25e9 * 0.88),
               0.01, "the time of the gates of 4096 tokens");
  const MlstmLaunch small_heads = launch(8, 8, 1 << 17, 32, 32, 0);
  const Plan divided = plan_mlstm(small_heads, GpuDevice{}).plan;
  subject = text(divided);
  expect(divided.dispatches.size() > 3, "the time divides a sequence whose states fit the workspace");
  for (size_t i = 1; i < divided.dispatches.size(); i += 2) {
    expect(divided.dispatches[i].seconds + divided.dispatches[i + 1].seconds < 1.01 * kLongestPlanSeconds,
           "no segment takes longer than kLongestPlanSeconds");
  }
  const Plan step = plan_mlstm_step(launch(1, 8, 1, 256, 512, 0), GpuDevice{}).plan;
  expect_close(seconds(step), 6e-6 + 2.0 * 8 * 256 * 512 * 4 / (68.25e9 * 0.88), 0.01, "a step moves its states");
}

void check_refusals() {
  expect_refused("S = 0", [] { plan_mlstm(launch(1, 1, 0, 8, 8, 0), GpuDevice{}); });
  expect_refused("B = 0", [] { plan_mlstm(launch(0, 1, 8, 8, 8, 0), GpuDevice{}); });
  expect_refused("offsets of gates", [] { plan_mlstm(launch(64, 64, 1 << 20, 8, 8, 0), GpuDevice{}); });
  expect_refused("a state's size", [] { plan_mlstm(launch(1, 1, 8, 1 << 16, 1 << 16, 0), GpuDevice{}); });
  expect_refused("S that is no multiple of chunk_size",
                 [] { plan_mlstm_states(launch(1, 1, 48, 8, 8, 32), GpuDevice{}); });
  expect_refused("S that is no multiple of save_every chunks", [] {
    MlstmLaunch from = launch(1, 1, 96, 8, 8, 32);
    from.save_every = 2;
    plan_mlstm_states(from, GpuDevice{});
  });
  expect_refused("S that is no multiple of chunk_size, for output",
                 [] { plan_mlstm_output(launch(1, 1, 48, 8, 8, 32), GpuDevice{}); });
  expect_refused("a stride beyond 32-bit offsets", [] {
    MlstmLaunch from = launch(1, 1, 48, 8, 8, 32);
    from.v.token = kMlstmMaxStride + 1;
    plan_mlstm(from, GpuDevice{});
  });
}

}  // namespace

int main(int argc, char** argv) {
  return test::run_cases(
      {{"choices", check_choices}, {"random", check_random}, {"times", check_times}, {"refusals", check_refusals}},
      argc, argv);
}
