// Plans the mLSTM operators for a GPU. Pure C++: no torch, no Metal.
#pragma once

#include <cstdint>

#include "csrc/mlstm/problem.h"
#include "csrc/planner/plan.h"

namespace marlin {

// What decides a plan. Like the problems in csrc/planner/problem.h, it has no padding and no floats.
struct MlstmLaunch {
  MlstmProblem sizes;
  MlstmStrides q{}, k{}, v{}, i{}, f{};
  ElementType element = ElementType::float16;  // dtype of q, k and v
  ElementType gates = ElementType::float16;    // dtype of i and f
  Flag has_initial_state{};
  Flag vector_aligned{};  // q, k and v start aligned for loads of four elements
  // C0 and n0, or the states passed to mlstm_output, start aligned for loads of four elements
  Flag vector_aligned_states{};
  FloatBits eps{};
  uint32_t save_every = 1;  // mlstm_states: chunks per saved state
  uint32_t unused = 0;
};

// The sizes, in floats, of the workspace that the caller allocates.
struct MlstmWorkspace {
  uint64_t gates = 0;
  uint64_t chunks = 0;
  uint32_t state_slots = 0;  // states per head that the workspace holds at a time
};

struct MlstmPlan {
  Plan plan;
  uint32_t chunk_size = 0;
  uint32_t chunks = 0;
  MlstmWorkspace workspace;
};

// All four functions throw std::invalid_argument if the problem is empty or needs offsets of more than 32 bits.
// plan_mlstm divides the sequence into segments. A segment has at most as many chunks as the workspace holds states,
// and its dispatches take at most longest_plan_seconds() together, unless one chunk takes longer. The plan computes the
// gates of the whole sequence first, and then the states and the output, segment after segment.
MlstmPlan plan_mlstm(const MlstmLaunch& launch, const GpuDevice& device);
MlstmPlan plan_mlstm_states(const MlstmLaunch& launch, const GpuDevice& device);
MlstmPlan plan_mlstm_output(const MlstmLaunch& launch, const GpuDevice& device);
MlstmPlan plan_mlstm_step(const MlstmLaunch& launch, const GpuDevice& device);

}  // namespace marlin
