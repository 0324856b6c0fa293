// The CPU planner of the mLSTM: which form, which chunks, how the work is split.
#pragma once

#include <string>

#include "csrc/cpu/gemm/plan.h"
#include "csrc/mlstm/problem.h"

namespace marlin::cpu {

enum class MlstmForm : int { sequential, chunkwise };

struct MlstmPlan {
  Isa isa;
  MlstmForm form;
  int64_t chunk_size;
  int64_t first_chunk;   // tokens of the first chunk, if it starts from a zero state and no chunk's state is stored
  int64_t strip;         // columns of a state in one kernel call
  int64_t max_rows;      // at most so many rows in one kernel call
  int64_t column_tasks;  // tasks that share the columns of one head
};

// wide: the inputs are fp64, for which there is only the recurrence.
MlstmPlan make_mlstm_plan(const Machine& machine, const MlstmProblem& problem, bool wide);
std::string to_string(const MlstmPlan& plan);

}  // namespace marlin::cpu
