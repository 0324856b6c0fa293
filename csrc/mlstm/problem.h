// The sizes of an mLSTM problem, which the planners of all backends take. Pure C++: no torch, no Metal.
#pragma once

#include <array>
#include <cstdint>

namespace marlin {

// The supported chunk sizes in tokens. A chunk size of 0 asks the planner to choose one of them.
inline constexpr std::array<int64_t, 5> kMlstmChunkSizes{16, 32, 64, 128, 256};

struct MlstmProblem {
  int64_t B = 0;
  int64_t H = 0;
  int64_t S = 0;  // any length; the last chunk may be short
  int64_t DK = 0;
  int64_t DV = 0;
  int64_t chunk_size = 0;  // as the caller gave it; may be 0
};

}  // namespace marlin
