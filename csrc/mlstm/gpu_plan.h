// Plans of the mLSTM operators on a GPU. Pure C++: no torch, no Metal.
#pragma once

#include "mlstm_plan.h"
#include "plan.h"

namespace marlin {

struct MlstmLaunch {
  MlstmProblem sizes;
  MlstmStrides q{}, k{}, v{}, i{}, f{};
  ElementType element = ElementType::float16;  // of q, k, v
  ElementType gates = ElementType::float16;    // of i, f
  bool has_initial_state = false;
  bool vector_aligned = false;         // the first elements of q, k and v are aligned for a load of four
  bool vector_aligned_states = false;  // the same for C0 and n0, or for given states
  float eps = 0.0F;
};

// What the caller allocates beside the results, in floats.
struct MlstmWorkspace {
  uint64_t gates = 0;
  uint64_t chunks = 0;
  uint32_t state_slots = 0;  // states before chunks that are held at a time, of each head
};

struct MlstmPlan {
  Plan plan;
  uint32_t chunk_size = 0;
  uint32_t chunks = 0;
  MlstmWorkspace workspace;
};

// The whole sequence in segments of as many chunks as the workspace holds states: gates once, then states and output
// of each segment. Each throws std::invalid_argument for an empty problem and for one beyond 32-bit offsets.
MlstmPlan plan_mlstm(const MlstmLaunch& launch);
MlstmPlan plan_mlstm_states(const MlstmLaunch& launch, uint32_t save_every);
MlstmPlan plan_mlstm_output(const MlstmLaunch& launch);
Plan plan_mlstm_step(const MlstmLaunch& launch);

}  // namespace marlin
