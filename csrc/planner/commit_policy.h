// When the GPU is given the work that has been encoded. PyTorch commits its command buffer when somebody waits for a
// result, so without this the GPU idles while the host encodes a whole token.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace marlin {

// Predicted GPU time between two commits. A boundary between command buffers costs the GPU about 20 us (MLX's issue
// 4521), which is less than a hundredth of it; the GPU waits for the host no longer than it takes to encode this much.
inline constexpr double kCommitSeconds = 3e-3;

// A product that is predicted to take longer is divided by rows. macOS may kill work that keeps the GPU from drawing
// the screen for some tenths of a second, and torch before 2.15 does not report that.
inline constexpr double kLongestPlanSeconds = 0.1;

// The limit in use, and another one for tests, whose products are small.
double longest_plan_seconds();
void set_longest_plan_seconds(double seconds);

// The interval in use; 0 means never. TORCH_MARLIN_METAL_COMMIT_MS, in milliseconds, replaces the default. Throws
// std::invalid_argument if that variable holds no number of at least 0.
double commit_seconds();

// Takes the place of the variable. Throws std::invalid_argument unless `seconds` is finite and at least 0.
void set_commit_seconds(double seconds);

// PyTorch numbers its default stream 0 and the 32 streams of its pool from 1.
inline constexpr size_t kStreams = 64;

// The predicted work of each stream since its last commit. A stream's entry is used only in blocks of its queue, so it
// needs no lock.
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
