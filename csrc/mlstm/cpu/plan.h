// The CPU planner of the mLSTM: chooses the form and the chunk sizes, and divides the work between threads.
#pragma once

#include <string>

#include "csrc/cpu/machine.h"
#include "csrc/mlstm/problem.h"

namespace marlin::cpu {

enum class MlstmForm : int { sequential, chunkwise };

struct MlstmPlan {
  Isa isa;
  MlstmForm form;
  int64_t chunk_size;
  // The number of tokens in the first chunk, if the initial state is zero and the states of chunks are not stored.
  // Otherwise the first chunk has chunk_size tokens.
  int64_t first_chunk;
  int64_t strip;         // columns of a state per kernel call
  int64_t max_rows;      // largest number of rows per kernel call
  int64_t column_tasks;  // tasks that share the columns of one head
};

// `wide` means fp64 inputs, which only the sequential form supports.
MlstmPlan make_mlstm_plan(const Machine& machine, const MlstmProblem& problem, bool wide);
std::string to_string(const MlstmPlan& plan);

}  // namespace marlin::cpu
