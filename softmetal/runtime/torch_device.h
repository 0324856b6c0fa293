// Declarations that the parts of the torch device share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSStream.h>
#include <c10/core/Allocator.h>

#include <functional>
#include <mutex>
#include <string>

#include "metal.h"

namespace softmetal {

inline constexpr unsigned kCoreCount = 8;  // GPU cores of an M1

// Locks all queues. A block of one of them holds the lock already.
std::unique_lock<std::recursive_mutex> lock_queues();
// Whether a block of that queue runs on this thread.
bool on_queue(dispatch_queue_t queue);
// Commits, runs all work of all streams and raises the faults that checked mode found. PyTorch's own operators do so by
// way of the queue: inside a block it is a violation.
void synchronize();

// The stream of PyTorch's pool that this thread encodes to, 1 to 32; 0 is the default stream.
inline constexpr int64_t kPoolStreams = 32;
void set_current_stream(int64_t number);
int64_t current_stream_number();
void for_each_stream(const std::function<void(at::mps::MPSStream&)>& visit);

// Of all streams since the process started.
struct StreamCounts {
  uint64_t commits = 0;           // of command buffers with commands
  uint64_t empty_commits = 0;     // and without
  uint64_t waits = 0;             // commits that waited for the GPU
  uint64_t encoders = 0;          // that kernels share
  uint64_t most_in_a_commit = 0;  // commands
  uint64_t uncommitted = 0;       // commands that are encoded and that the GPU has not been given
};
StreamCounts stream_counts();

// The kernel between beginProfileKernel and endProfileKernel on this thread.
struct ProfiledKernel {
  const void* handle = nullptr;
  std::string label;
};
ProfiledKernel& profiled_kernel();

// Throws one error with the faults found since the last call, if any.
void raise_new_faults();

c10::Allocator& allocator();
// Returns the object behind an mps tensor's storage; nil if it is empty.
SoftMetalBuffer* buffer_of(const at::Tensor& tensor);

}  // namespace softmetal

@interface SoftMetalDispatchQueue : NSObject <OS_dispatch_queue>
@end
