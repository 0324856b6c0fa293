// What the planners of the mLSTM operators start from, on every backend. Pure C++: no torch, no Metal.
#pragma once

#include <array>
#include <cstdint>

namespace marlin {

// Tokens of a chunk. 0 stands for the planner's choice, which is one of these.
inline constexpr std::array<int64_t, 5> kMlstmChunkSizes{16, 32, 64, 128, 256};

struct MlstmProblem {
  int64_t B = 0;
  int64_t H = 0;
  int64_t S = 0;  // any number; the last chunk may be short
  int64_t DK = 0;
  int64_t DV = 0;
  int64_t chunk_size = 0;  // as the caller gave it
};

}  // namespace marlin
