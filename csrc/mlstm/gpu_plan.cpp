#include "csrc/mlstm/gpu_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "csrc/core/math.h"
#include "csrc/planner/commit_policy.h"
#include "csrc/planner/rates.h"

namespace marlin {

namespace {

// Rates of one core per clock. kProductsPerClock is the number of fp32 multiply-adds that simdgroup matrices reach
// inside a GEMM (measured by metal-benchmarks). kBytesPerClock is one core's share of the DRAM bandwidth; the chips
// from M1 to M2 Max have 6.7 to 9.9.
constexpr double kProductsPerClock = 101.7;
constexpr double kBytesPerClock = 8.0;
// The limit for the workspace of states between mlstm_states and mlstm_output. If even one state per head exceeds it,
// the workspace holds one state per head.
constexpr uint64_t kStateWorkspaceBytes = uint64_t{128} << 20;
constexpr uint32_t kGateChunksPerGroup = 4;  // chunks per threadgroup of mlstm_gates, if no chunk needs an earlier one
constexpr uint32_t kMinStepRows = 8;         // a simdgroup of mlstm_step has at least this many rows of C

// Throws std::invalid_argument with the text `rule` if the condition is false. Operators check their arguments before
// they plan, so the only failures here are sizes beyond 32-bit offsets.
void require(bool condition, const char* rule) {
  if (!condition) throw std::invalid_argument(rule);
}

uint32_t output_simdgroups(uint32_t DV) {
  const uint32_t strips = ceil_divide(DV, kMlstmSimdColumns);
  return ceil_divide(strips, ceil_divide(strips, kMlstmMaxSimdgroups));
}

// The clocks that one core needs per token and head.
struct Clocks {
  double states;  // in mlstm_states
  double output;  // in mlstm_output
};

// Estimates the clocks. Larger chunks move fewer states through memory, but they compare each query with more keys.
Clocks clocks(const MlstmProblem& sizes, int64_t chunk_size) {
  constexpr double kBlockTokens = kMlstmBlock;
  const auto padded = [](int64_t size) { return double(round_up(uint64_t(size), kMlstmSimdColumns)); };
  const auto columns = static_cast<uint32_t>(sizes.DV);
  const double column_groups = ceil_divide(columns, kMlstmSimdColumns * output_simdgroups(columns));
  const double DK = padded(sizes.DK), DV = padded(sizes.DV), tokens = double(chunk_size);
  // The computed rows per query: 1, or more for a chunk that is shorter than a block, because it is padded to a block.
  const double rows = std::max(1.0, kBlockTokens / tokens);
  const double keys = (std::max(tokens, kBlockTokens) + kBlockTokens) / 2;
  const double states = DK * DV / kProductsPerClock;
  const double output = rows * (DK * DV + keys * (DK * column_groups + DV)) / kProductsPerClock;
  const double memory = DK * DV * sizeof(float) / tokens / kBytesPerClock;
  return {std::max(states, memory), std::max(output, memory)};
}

uint32_t choose_chunk_size(const MlstmProblem& sizes) {
  if (sizes.chunk_size != 0) return static_cast<uint32_t>(sizes.chunk_size);
  int64_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t size : kMlstmChunkSizes) {
    if (best != 0 && size >= 2 * sizes.S) break;
    const Clocks of_a_token = clocks(sizes, size);
    const double cost = of_a_token.states + of_a_token.output;
    if (cost < least) {
      least = cost;
      best = size;
    }
  }
  return static_cast<uint32_t>(best);
}

struct Planner {
  const MlstmLaunch& launch;
  const GpuDevice& device;
  MlstmParams params{};
  FunctionConstants constants{};
  MlstmPlan result;

  Planner(const MlstmLaunch& launch, const GpuDevice& device) : launch(launch), device(device) {
    const MlstmProblem& sizes = launch.sizes;
    require(sizes.B > 0 && sizes.H > 0 && sizes.S > 0 && sizes.DK > 0 && sizes.DV > 0, "the problem is empty");
    constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
    const auto fits = [](int64_t a, int64_t b) { return a <= kLargest / b; };
    require(fits(sizes.B, sizes.H) && fits(sizes.DK, sizes.DV), "B * H and DK * DV must fit in 31 bits");
    const int64_t stride = static_cast<int64_t>(round_up(uint64_t(sizes.S), 4));
    require(
        fits(stride, sizes.DV) && fits(stride, sizes.B * sizes.H) && fits(stride * sizes.B * sizes.H, kGateVectorCount),
        "B * H * S * 6 and S * DV must fit in 31 bits");
    for (const MlstmStrides* strides : {&launch.q, &launch.k, &launch.v}) {
      require(strides->token >= 0 && strides->token <= kMlstmMaxStride,
              "the token stride must be at most kMlstmMaxStride");
    }

    result.chunk_size = choose_chunk_size(sizes);
    result.chunks = ceil_divide(static_cast<uint32_t>(sizes.S), result.chunk_size);
    params.q = launch.q;
    params.k = launch.k;
    params.v = launch.v;
    params.i = launch.i;
    params.f = launch.f;
    params.heads = static_cast<uint32_t>(sizes.B * sizes.H);
    params.heads_per_batch = static_cast<uint32_t>(sizes.H);
    params.S = static_cast<uint32_t>(sizes.S);
    params.DK = static_cast<uint32_t>(sizes.DK);
    params.DV = static_cast<uint32_t>(sizes.DV);
    params.chunk_size = result.chunk_size;
    params.chunks = params.segment_chunks = result.chunks;
    params.save_every = 1;
    params.state_slots = result.chunks + 1;
    params.final_slots = 1;
    params.gate_stride = static_cast<uint32_t>(stride);
    params.gate_type = static_cast<int32_t>(launch.gates);
    params.flags = launch.has_initial_state ? kMlstmInitialState : 0;
    params.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(sizes.DK)));
    params.eps = launch.eps;
    result.workspace.gates = uint64_t{kGateVectorCount} * params.heads * params.gate_stride;
    result.workspace.chunks = uint64_t{kChunkVectorCount} * params.heads * params.chunks;

    const bool whole_vectors = params.DK % 4 == 0 && params.DV % 4 == 0;
    const auto even = [](const MlstmStrides& s) { return s.batch % 4 == 0 && s.head % 4 == 0 && s.token % 4 == 0; };
    constants[kConstantVectorActivations] =
        whole_vectors && launch.vector_aligned && even(launch.q) && even(launch.k) && even(launch.v);
    constants[kConstantVectorColumns] = whole_vectors && launch.vector_aligned_states;
  }

  // Returns the seconds that the GPU needs for a chunk of all heads.
  double chunk_seconds(double clocks_of_a_token) const {
    return clocks_of_a_token * params.heads * params.chunk_size / (device.cores * device.chip->clock_ghz.value * 1e9);
  }

  void add(Kernel kernel, Extent grid, uint32_t threads, uint32_t threadgroup_bytes, const MlstmParams& own_params,
           double seconds) {
    result.plan.dispatches.push_back({.instance = {.kernel = kernel, .element = launch.element},
                                      .constants = constants,
                                      .grid = grid,
                                      .threads = {threads, 1, 1},
                                      .threadgroup_bytes = threadgroup_bytes,
                                      .params = own_params,
                                      .seconds = seconds});
  }

  // Adds a dispatch of mlstm_gates. m_slots is the number of elements per head in the tensor of the final stabiliser.
  void add_gates(uint32_t flags, uint32_t m_slots) {
    MlstmParams own = params;
    own.flags |= flags;
    own.final_slots = m_slots;
    const bool independent = (flags & kMlstmGivenM) != 0;
    const uint32_t simdgroups =
        std::min<uint32_t>(params.chunks, independent ? kGateChunksPerGroup : uint32_t{kMlstmGateSimdgroups});
    const uint32_t groups = independent ? ceil_divide(params.chunks, simdgroups) : 1;
    const double read = 2.0 * params.heads * params.S * element_bytes(launch.gates);
    const auto written = static_cast<double>(result.workspace.gates * sizeof(float));
    add(Kernel::mlstm_gates, {groups, params.heads, 1}, simdgroups * kSimdWidth, 0, own,
        traffic_seconds(read + written, device));
  }

  void add_states() {
    add(Kernel::mlstm_states,
        {ceil_divide(params.DV, kMlstmStateTile), ceil_divide(params.DK, kMlstmStateTile), params.heads},
        kMlstmStateThreads, 0, params,
        kDispatchSeconds + params.segment_chunks * chunk_seconds(clocks(launch.sizes, params.chunk_size).states));
  }

  void add_output() {
    const uint32_t simdgroups = output_simdgroups(params.DV);
    add(Kernel::mlstm_output,
        {ceil_divide(params.DV, kMlstmSimdColumns * simdgroups),
         params.segment_chunks * ceil_divide(params.chunk_size, kMlstmBlock), params.heads},
        simdgroups * kSimdWidth, mlstm_output_bytes(params.chunk_size), params,
        kDispatchSeconds + params.segment_chunks * chunk_seconds(clocks(launch.sizes, params.chunk_size).output));
  }
};

}  // namespace

MlstmPlan plan_mlstm(const MlstmLaunch& launch, const GpuDevice& device) {
  Planner planner(launch, device);
  MlstmParams& params = planner.params;
  const uint64_t state_bytes = uint64_t{params.heads} * params.DK * params.DV * sizeof(float);
  const Clocks of_a_token = clocks(launch.sizes, params.chunk_size);
  const double in_time = longest_plan_seconds() / planner.chunk_seconds(of_a_token.states + of_a_token.output);
  const double in_memory = static_cast<double>(kStateWorkspaceBytes / state_bytes);
  const auto segment = static_cast<uint32_t>(std::clamp(std::min(in_time, in_memory), 1.0, double(params.chunks)));
  params.state_slots = planner.result.workspace.state_slots = segment;
  planner.add_gates(kMlstmForOutput, 1);
  for (uint32_t first = 0; first < planner.result.chunks; first += segment) {
    params.first_chunk = first;
    params.segment_chunks = std::min(segment, planner.result.chunks - first);
    planner.add_states();
    planner.add_output();
  }
  return planner.result;
}

MlstmPlan plan_mlstm_states(const MlstmLaunch& launch, const GpuDevice& device) {
  const uint32_t save_every = launch.save_every;
  Planner planner(launch, device);
  MlstmParams& params = planner.params;
  require(save_every > 0 && params.S % (uint64_t{params.chunk_size} * save_every) == 0,
          "S must be a multiple of chunk_size * save_states_every");
  params.save_every = save_every;
  params.state_slots = params.final_slots = params.chunks / save_every + 1;
  planner.add_gates(0, params.chunks + 1);
  planner.add_states();
  return planner.result;
}

MlstmPlan plan_mlstm_output(const MlstmLaunch& launch, const GpuDevice& device) {
  Planner planner(launch, device);
  require(planner.params.S % planner.params.chunk_size == 0, "S must be a multiple of chunk_size");
  planner.add_gates(kMlstmForOutput | kMlstmGivenM, 1);
  planner.add_output();
  return planner.result;
}

MlstmPlan plan_mlstm_step(const MlstmLaunch& launch, const GpuDevice& device) {
  Planner planner(launch, device);
  const MlstmParams& params = planner.params;
  const uint32_t simdgroups = std::clamp<uint32_t>(ceil_divide(params.DK, kMinStepRows), 1, kMlstmStepMaxSimdgroups);
  planner.add(Kernel::mlstm_step, {ceil_divide(params.DV, kMlstmStepColumns), params.heads, 1}, simdgroups * kSimdWidth,
              mlstm_step_bytes(simdgroups), params,
              traffic_seconds(2.0 * params.heads * params.DK * params.DV * sizeof(float), device));
  return planner.result;
}

}  // namespace marlin
