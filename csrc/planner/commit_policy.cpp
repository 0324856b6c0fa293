#include "csrc/planner/commit_policy.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace marlin {

namespace {

double interval_of_environment() {
  const char* text = std::getenv("TORCH_MARLIN_METAL_COMMIT_MS");
  if (text == nullptr || *text == '\0') return kCommitSeconds;
  char* end = nullptr;
  const double milliseconds = std::strtod(text, &end);
  if (end != text + std::strlen(text) || !std::isfinite(milliseconds) || milliseconds < 0) {
    throw std::invalid_argument("TORCH_MARLIN_METAL_COMMIT_MS: expected milliseconds, 0 for never, got '" +
                                std::string(text) + "'");
  }
  return milliseconds * 1e-3;
}

std::atomic<double>& interval() {
  static std::atomic<double> seconds{interval_of_environment()};
  return seconds;
}

std::atomic<double> longest_plan{kLongestPlanSeconds};

}  // namespace

double longest_plan_seconds() {
  return longest_plan;
}

void set_longest_plan_seconds(double seconds) {
  longest_plan = seconds;
}

double commit_seconds() {
  return interval();
}

void set_commit_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) {
    throw std::invalid_argument("commit interval: expected seconds of at least 0, got " + std::to_string(seconds));
  }
  interval() = seconds;
}

}  // namespace marlin
