// Plans the mLSTM operators for a GPU. Uses neither torch nor Metal.
#pragma once

#include <cstdint>

#include "csrc/mlstm/problem.h"
#include "csrc/planner/plan.h"

namespace marlin {

// The values that determine a plan. They have no padding and no floats, for the reason in csrc/planner/problem.h.
struct MlstmLaunch {
  MlstmProblem sizes;
  MlstmStrides q{}, k{}, v{}, i{}, f{};
  ElementType element = ElementType::float16;  // dtype of q, k and v
  ElementType gates = ElementType::float16;    // dtype of i and f
  Flag has_initial_state{};
  Flag vector_aligned{};  // true if loads of four elements are aligned at the start of q, k and v
  // true if loads of four elements are aligned at the start of C0 and n0, or of the states that mlstm_output reads
  Flag vector_aligned_states{};
  FloatBits eps{};
  uint32_t save_every = 1;  // mlstm_states: chunks per saved state
  uint32_t unused = 0;
};

// The sizes in floats of the workspace, which the caller allocates.
struct MlstmWorkspace {
  uint64_t gates = 0;
  uint64_t chunks = 0;
  uint32_t state_slots = 0;  // the states per head that fit in the workspace at a time
};

struct MlstmPlan {
  Plan plan;
  uint32_t chunk_size = 0;
  uint32_t chunks = 0;
  MlstmWorkspace workspace;
};

// All four functions throw std::invalid_argument if the problem is empty or needs offsets of more than 32 bits.
// plan_mlstm computes the gates of the whole sequence first. Then it computes states and output, segment by segment.
// The states of a segment fit in the workspace, and all dispatches of a segment take at most longest_plan_seconds(). A
// segment has at least one chunk in any case.
MlstmPlan plan_mlstm(const MlstmLaunch& launch, const GpuDevice& device);
MlstmPlan plan_mlstm_states(const MlstmLaunch& launch, const GpuDevice& device);
MlstmPlan plan_mlstm_output(const MlstmLaunch& launch, const GpuDevice& device);
MlstmPlan plan_mlstm_step(const MlstmLaunch& launch, const GpuDevice& device);

}  // namespace marlin
