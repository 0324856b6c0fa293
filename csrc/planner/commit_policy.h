// Decides when the host commits encoded work to the GPU. PyTorch commits its command buffer only when the program waits
// for a result. Without further commits, the GPU would idle while the host encodes a whole token.
#pragma once

#include <array>
#include <cstddef>

namespace marlin {

// Predicted GPU time between two commits. A boundary between command buffers costs the GPU about 20 us (MLX issue
// 4521), less than 1 % of this interval. An idle GPU starts as soon as the host has encoded this much work.
inline constexpr double kCommitSeconds = 3e-3;

// macOS may kill work that blocks the screen for some tenths of a second, and torch before 2.15 does not report the
// failure. So a product with a longer predicted time than this limit is divided by rows.
inline constexpr double kLongestPlanSeconds = 0.1;

// Returns or sets the current limit. Tests set a lower limit, because their products are small.
double longest_plan_seconds();
void set_longest_plan_seconds(double seconds);

// Returns the current interval; 0 means that the package never commits. The environment variable
// TORCH_MARLIN_METAL_COMMIT_MS, in milliseconds, replaces the default. Throws std::invalid_argument unless the variable
// holds a number of at least 0.
double commit_seconds();

// Sets the interval and overrides the variable. Throws std::invalid_argument unless `seconds` is finite and at least 0.
void set_commit_seconds(double seconds);

// PyTorch's default stream has number 0, and the 32 streams of its pool have the numbers from 1. This is the next power
// of two above these 33 streams.
inline constexpr size_t kStreams = 64;

// The predicted time of each stream's work since its last commit. Only blocks on a stream's own queue access its entry,
// so no lock is needed.
class UncommittedWork {
 public:
  // Adds a stream's predicted seconds. Returns true if the sum has reached the interval, and then resets the sum to 0.
  bool add(size_t stream, double seconds) {
    const double interval = commit_seconds();
    double& sum = seconds_[stream % kStreams];
    sum += seconds;
    if (interval == 0 || sum < interval) return false;
    sum = 0;
    return true;
  }

 private:
  std::array<double, kStreams> seconds_{};
};

}  // namespace marlin
