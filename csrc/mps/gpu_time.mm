// The GPU's own time of what a thread encodes, for torch_marlin_metal/gpu/tuning: operators without tensors, which only
// a build with this backend has.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <tuple>
#include <utility>

#include "csrc/mps/stream.h"

namespace marlin::mps {
namespace {

// Filled by handlers of the command buffer that was current when the measurement began and of the one at its end. The
// buffers are retained, so that two of them cannot have one address.
struct Measurement {
  id<MTLCommandBuffer> first = nil;
  id<MTLCommandBuffer> last = nil;

  Measurement() = default;
  Measurement(const Measurement&) = delete;
  Measurement& operator=(const Measurement&) = delete;
  ~Measurement() {
    [first release];
    [last release];
  }
};

thread_local std::shared_ptr<Measurement> current;

// Commits the work from before without waiting for it: the GPU is busy, at its full clock, while the host encodes what
// is measured.
void begin_gpu_time() {
  TORCH_CHECK(current == nullptr, "torch_marlin_metal: _begin_gpu_time: this thread's measurement has not ended");
  const auto measurement = std::make_shared<Measurement>();
  run_on_queue(^{
    commit();
    add_completed_handler(^(id<MTLCommandBuffer> buffer) {
      measurement->first = [buffer retain];
    });
  });
  current = measurement;
  hold_commits(true);
}

// Waits for the work since begin_gpu_time. Returns the seconds from its start to its end on the GPU, and whether all of
// it was in one command buffer. PyTorch may commit in between, as for a copy to the host; what the GPU then waits for
// the host is part of the time.
std::tuple<double, bool> end_gpu_time() {
  TORCH_CHECK(current != nullptr, "torch_marlin_metal: _end_gpu_time: this thread has begun no measurement");
  const std::shared_ptr<Measurement> measurement = std::exchange(current, nullptr);
  hold_commits(false);
  run_on_queue(^{
    add_completed_handler(^(id<MTLCommandBuffer> buffer) {
      measurement->last = [buffer retain];
    });
    commit_and_wait();
  });
  TORCH_CHECK(measurement->first != nil && measurement->last != nil,
              "torch_marlin_metal: _end_gpu_time: the GPU reported no times");
  return {[measurement->last GPUEndTime] - [measurement->first GPUStartTime],
          measurement -> first == measurement -> last};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_marlin_metal, m) {
  m.def("_begin_gpu_time() -> ()", begin_gpu_time);
  m.def("_end_gpu_time() -> (float, bool)", end_gpu_time);
}

}  // namespace marlin::mps
