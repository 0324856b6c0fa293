// The sizes of an mLSTM problem for the planners of all backends. Uses neither torch nor Metal.
#pragma once

#include <array>
#include <cstdint>

namespace marlin {

// The supported chunk sizes in tokens. If the caller passes 0, the planner chooses one of these sizes.
inline constexpr std::array<int64_t, 5> kMlstmChunkSizes{16, 32, 64, 128, 256};

struct MlstmProblem {
  int64_t B = 0;
  int64_t H = 0;
  int64_t S = 0;  // any length; the last chunk may be short
  int64_t DK = 0;
  int64_t DV = 0;
  int64_t chunk_size = 0;  // the value that the caller passed; may be 0
};

}  // namespace marlin
