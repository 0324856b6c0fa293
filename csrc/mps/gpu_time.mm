// Operators that measure the work that a thread encodes, by the GPU's clock. torch_marlin_metal/gpu/tuning calls them.
// They take no tensors, and only a build with the MPS backend has them.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <tuple>
#include <utility>

#include "csrc/mps/pytorch_internals.h"

namespace marlin::mps {
namespace {

// The first and the last command buffer of the measurement; their completed handlers store them. Both are retained: if
// the first one were freed, the last one could get its address, and the comparison in end_gpu_time would take them for
// a single buffer.
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

// Commits all earlier work without waiting for it. The GPU is then busy, and at its full clock, while the host encodes
// the work to be measured.
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

// Waits for the work that was encoded since begin_gpu_time. Returns the seconds from the work's start to its end on the
// GPU, and true if a single command buffer held all the work. PyTorch may commit in between, for example for a copy to
// the host. Then there are several command buffers, and the seconds include the GPU's wait for the host.
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
