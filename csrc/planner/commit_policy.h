// Decides when encoded work is given to the GPU. PyTorch commits its command buffer only when the program waits for a
// result. Without further commits, the GPU would idle while the host encodes all the work of a token.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace marlin {

// Predicted GPU time between two commits. A boundary between command buffers costs the GPU about 20 us (MLX's issue
// 4521), which is less than 1 % of this interval. An idle GPU waits only until the host has encoded this much work.
inline constexpr double kCommitSeconds = 3e-3;

// macOS may kill work that blocks the screen for some tenths of a second, and torch before 2.15 does not report it. A
// product that is predicted to take longer than this limit is therefore divided by rows.
inline constexpr double kLongestPlanSeconds = 0.1;

// Returns or sets the limit in use. Tests set a lower limit, because their products are small.
double longest_plan_seconds();
void set_longest_plan_seconds(double seconds);

// Returns the interval in use; 0 means that the package never commits. The environment variable
// TORCH_MARLIN_METAL_COMMIT_MS, in milliseconds, replaces the default. Throws std::invalid_argument unless the variable
// holds a number of at least 0.
double commit_seconds();

// Sets the interval, in place of the variable. Throws std::invalid_argument unless `seconds` is finite and at least 0.
void set_commit_seconds(double seconds);

// PyTorch numbers its default stream 0 and the 32 streams of its pool from 1. The 33 are rounded up to a power of two.
inline constexpr size_t kStreams = 64;

// The predicted work of each stream since the stream's last commit. Only blocks of a stream's own queue use its entry,
// so no lock is needed.
class UncommittedWork {
 public:
  // Adds work; returns true, and starts again from 0, if it is time to commit.
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
