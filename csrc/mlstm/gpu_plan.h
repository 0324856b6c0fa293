// Plans of the mLSTM operators on a GPU. Pure C++: no torch, no Metal.
#pragma once

#include "csrc/mlstm/problem.h"
#include "csrc/planner/plan.h"

namespace marlin {

struct MlstmLaunch {
  MlstmProblem sizes;
  MlstmStrides q{}, k{}, v{}, i{}, f{};
  ElementType element = ElementType::float16;  // dtype of q, k and v
  ElementType gates = ElementType::float16;    // dtype of i and f
  bool has_initial_state = false;
  bool vector_aligned = false;         // the first elements of q, k and v are aligned for a load of four
  bool vector_aligned_states = false;  // the same for C0 and n0, or for given states
  float eps = 0.0F;
};

// Workspace that the caller allocates beside the results, in floats.
struct MlstmWorkspace {
  uint64_t gates = 0;
  uint64_t chunks = 0;
  uint32_t state_slots = 0;  // states before chunks per head that the workspace holds at a time
};

struct MlstmPlan {
  Plan plan;
  uint32_t chunk_size = 0;
  uint32_t chunks = 0;
  MlstmWorkspace workspace;
};

// Plans the whole sequence in segments of as many chunks as the workspace holds states: the gates once, then the states
// and the output of each segment. Each throws std::invalid_argument for an empty problem and for one beyond 32-bit
// offsets.
MlstmPlan plan_mlstm(const MlstmLaunch& launch);
MlstmPlan plan_mlstm_states(const MlstmLaunch& launch, uint32_t save_every);
MlstmPlan plan_mlstm_output(const MlstmLaunch& launch);
Plan plan_mlstm_step(const MlstmLaunch& launch);

}  // namespace marlin
