// PyTorch's serial queues: the blocks that encode, and the locks that order the blocks.
#include <ATen/mps/MPSStream.h>

#include <algorithm>
#include <mutex>

#include "../metal.h"
#include "torch_device.h"

using softmetal::violation;

@implementation SoftMetalDispatchQueue
@end

namespace softmetal {
namespace {

std::recursive_mutex queue_mutex;
thread_local std::vector<const void*> running;  // the queues whose blocks run on this thread, innermost last
uint64_t block_count = 0;

class BlockScope {
 public:
  explicit BlockScope(dispatch_queue_t queue) : lock_(queue_mutex, std::defer_lock) {
    if (on_queue(queue)) {
      violation("re-entrant dispatch_sync", "dispatch_sync was called from a block of the same queue: a deadlock on a "
                                            "Mac. PyTorch operators on mps tensors do so");
    }
    lock_.lock();
    running.push_back(queue);
    ++block_count;
  }
  ~BlockScope() {
    running.pop_back();
    profiled_kernel() = {};
  }
  BlockScope(const BlockScope&) = delete;
  BlockScope& operator=(const BlockScope&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

}  // namespace

bool on_queue() {
  return !running.empty();
}
bool on_queue(dispatch_queue_t queue) {
  return std::ranges::find(running, static_cast<const void*>(queue)) != running.end();
}
uint64_t queue_block() {
  return block_count;
}
std::unique_lock<std::recursive_mutex> lock_queues() {
  return std::unique_lock(queue_mutex);
}

}  // namespace softmetal

extern "C" __attribute__((visibility("default"))) void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block) {
  const softmetal::BlockScope scope(queue);
  try {
    block();
  } catch (const std::exception& error) {
    violation("exception across dispatch_sync",
              "a C++ exception left the block of a plain dispatch_sync, which ends a "
              "Mac's process; use dispatch_sync_with_rethrow. It said: ",
              error.what());
  }
}

void at::mps::dispatch_sync_with_rethrow(dispatch_queue_t queue, void (^block)()) {
  const softmetal::BlockScope scope(queue);
  block();
  if (softmetal::profiled_kernel().handle != nullptr) {
    violation("profiler pairing", "beginProfileKernel without endProfileKernel in the block");
  }
}
