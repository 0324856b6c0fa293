// Declarations for the files that implement PyTorch's mps backend (torch_*.mm).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSStream.h>
#include <c10/core/Allocator.h>
#include <torch/headeronly/version.h>

#include <functional>
#include <mutex>
#include <string>

#include "../metal.h"

// Whether the installed headers are of torch 2.<minor> or later. The device implements the headers of 2.13 to 2.15.
// torch 2.14 added the pool of streams. torch 2.15 added the errors of command buffers and the stream arguments of the
// profiler.
#define SOFTMETAL_TORCH_2(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace softmetal {

inline constexpr unsigned kCoreCount = 8;  // GPU cores of an M1

// Locks all queues. The lock is recursive, because a thread that runs a block of a queue already holds the lock.
std::unique_lock<std::recursive_mutex> lock_queues();
// Returns whether a block of that queue is running on this thread.
bool on_queue(dispatch_queue_t queue);
// Commits and runs all work of all streams, and raises the faults that checked mode found. On a Mac, PyTorch's
// operators wait for the queue at this point, so a call inside a block is a violation.
void synchronize();

// Encodes a write to this memory on the current stream.
void write_later(Memory& memory, std::function<void()> write);

// The stream of PyTorch's pool to which this thread encodes, 1 to 32; 0 is the default stream.
inline constexpr int64_t kPoolStreams = 32;
void set_current_stream(int64_t number);
int64_t current_stream_number();
at::mps::MPSStream* stream_of_number(int64_t number);
void for_each_stream(const std::function<void(at::mps::MPSStream&)>& visit);

// Counts of all streams since the process started.
struct StreamCounts {
  uint64_t commits = 0;           // commits of command buffers with commands
  uint64_t empty_commits = 0;     // commits of command buffers without commands
  uint64_t waits = 0;             // commits that waited for the GPU
  uint64_t encoders = 0;          // compute encoders, which several kernels may share
  uint64_t most_in_a_commit = 0;  // commands in the largest command buffer
  uint64_t uncommitted = 0;       // encoded commands that are not committed yet
};
StreamCounts stream_counts();

// The kernel between beginProfileKernel and endProfileKernel on this thread.
struct ProfiledKernel {
  const void* handle = nullptr;
  std::string label;
};
ProfiledKernel& profiled_kernel();

// If faults were found since the last call, throws one error that contains all of them.
void raise_new_faults();

c10::Allocator& allocator();
// Returns the buffer behind an mps tensor's storage, or nil if the storage is empty.
SoftMetalBuffer* buffer_of(const at::Tensor& tensor);

}  // namespace softmetal

@interface SoftMetalDispatchQueue : NSObject <OS_dispatch_queue>
@end
