// Operators that measure a thread's encoded work by the GPU's clock. torch_marlin_metal/gpu/tuning calls them. They
// take no tensors, and only a build with this backend has them.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <tuple>
#include <utility>

#include "csrc/mps/pytorch_internals.h"

namespace marlin::mps {
namespace {

// The current command buffers at the begin and at the end of the measurement. Their completed handlers fill in the
// pointers. The buffers are retained, because the last could otherwise get the address of the first.
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

// Commits all earlier work and does not wait for it. The GPU is then busy, and runs at its full clock, while the host
// encodes the work to be measured.
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

// Waits for the work that was encoded since begin_gpu_time. Returns the seconds from its start to its end on the GPU,
// and whether one command buffer held all of it. If PyTorch committed in between, for example for a copy to the host,
// there are several command buffers, and the time includes the GPU's wait for the host.
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
