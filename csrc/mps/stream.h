// PyTorch's MPS stream, device, tensors and profiler. Only stream.mm includes PyTorch's private MPS headers, so a new
// version of torch needs changes only there.
#pragma once

#import <Metal/Metal.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace marlin::mps {

id<MTLDevice> device();
std::string gpu_name();  // e.g. "Apple M1 Max"
uint32_t gpu_core_count();
uint32_t gpu_family();  // n of the newest Apple<n> that Metal reports, of those that this package knows; 0 for none

// The buffer belongs to the tensor's storage, and no reference is added. The offset is in bytes.
id<MTLBuffer> buffer_of(const at::Tensor& tensor);
NSUInteger offset_of(const at::Tensor& tensor);

// Runs the block on the stream's queue and rethrows what it throws. The block must not allocate or copy tensors
// (dispatch_sync is not re-entrant); it may commit and wait with the functions below.
void run_on_queue(void (^block)());

// Inside such a block: ends the encoder, gives the GPU what is encoded and, in the second case, waits for it. An
// encoder or command buffer from before is not to be used any more.
void commit();
void commit_and_wait();

// Inside such a block: ends the encoder and calls the handler when the GPU has completed what is encoded so far and
// what is encoded until the next commit.
void add_completed_handler(MTLCommandBufferHandler handler);

// Inside such a block: the command buffer that is being filled, which a commit replaces, and the number of the stream,
// below kStreams.
id<MTLCommandBuffer> command_buffer();
size_t stream_number();

// Inside such a block, after its last kernel: commits if enough work is waiting for that
// (csrc/planner/commit_policy.h). Does nothing while a profiler or signposts record, because PyTorch then marks work by
// command buffers of its own, and while this thread holds commits.
void work_encoded(double predicted_seconds);
void hold_commits(bool held);

// Returns the encoder that PyTorch's own kernels use. Call it only inside a block of run_on_queue. A ProfiledKernel may
// replace the encoder.
id<MTLComputeCommandEncoder> encoder();

// Returns true if torch.mps.profiler is recording kernels.
bool is_profiling();

// Shows everything that is encoded during its lifetime to torch.mps.profiler as one kernel. Use it only inside a block
// of run_on_queue. A recording profiler adds handlers to the command buffer, both when the kernel begins and when it
// ends. macOS 26.4 aborts if a handler is added while an encoder is open, so the encoder is ended first both times.
class ProfiledKernel {
 public:
  // `tensors` are read only by a recording profiler.
  ProfiledKernel(id<MTLComputePipelineState> pipeline, const std::string& name, at::TensorList tensors);
  ~ProfiledKernel();
  ProfiledKernel(const ProfiledKernel&) = delete;
  ProfiledKernel& operator=(const ProfiledKernel&) = delete;

 private:
  id<MTLComputePipelineState> pipeline_;
};

}  // namespace marlin::mps
