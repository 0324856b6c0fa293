// The CPU half of the mLSTM's planner: which form, which chunks, how the work is split.
#pragma once

#include <string>

#include "../mlstm_plan.h"
#include "plan.h"

namespace marlin::cpu {

enum class MlstmForm : int { sequential, chunkwise };

struct MlstmPlan {
  Isa isa;
  MlstmForm form;
  int64_t chunk_size;
  int64_t first_chunk;  // tokens of the first chunk where the state before it is zero and no chunk's state is asked for
  int64_t strip;        // columns of a state that a kernel call works on
  int64_t max_rows;     // rows of one kernel call, at most
  int64_t column_tasks;  // tasks that share the columns of one head
};

// wide: inputs in fp64, which have the recurrence alone.
MlstmPlan make_mlstm_plan(const Machine& machine, const MlstmProblem& problem, bool wide);
std::string to_string(const MlstmPlan& plan);

}  // namespace marlin::cpu
