// Access to PyTorch's MPS stream, device, tensors and profiler. Only pytorch_internals.mm includes PyTorch's private
// MPS headers, so a change of those headers affects only that file.
#pragma once

#import <Metal/Metal.h>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <string>

#include "csrc/planner/device.h"

namespace marlin::mps {

id<MTLDevice> device();
std::string gpu_name();  // e.g. "Apple M1 Max"
uint32_t gpu_core_count();
uint32_t gpu_family();  // n of the newest family Apple<n> that Metal reports and this package supports; 0 if there is
                        // none

// Returns the GPU's family, the version of macOS, and the newest version of the Metal language that this package uses.
MetalSystem metal_system();

// Returns the buffer of the tensor's storage without retaining it, and the tensor's offset in that buffer in bytes.
id<MTLBuffer> buffer_of(const at::Tensor& tensor);
NSUInteger offset_of(const at::Tensor& tensor);

// Runs the block on the stream's queue and rethrows the block's exception. The block must not allocate or copy tensors,
// because both use the queue, and dispatch_sync is not re-entrant. The block may commit and wait with the functions
// below.
void run_on_queue(void (^block)());

// If `held` is true, work_encoded() does not commit on this thread until hold_commits(false).
void hold_commits(bool held);

// Call the functions below only inside a block of run_on_queue.

// Ends the encoder and commits the command buffer to the GPU. commit_and_wait() also waits for the GPU. Do not use the
// earlier encoder or command buffer afterwards.
void commit();
void commit_and_wait();

// Ends the encoder and adds a handler to the current command buffer. Metal calls the handler after the GPU has
// completed all work that is encoded up to the next commit.
void add_completed_handler(MTLCommandBufferHandler handler);

// The current command buffer, which a commit replaces, and the number of the stream (less than kStreams).
id<MTLCommandBuffer> command_buffer();
size_t stream_number();

// Commits if enough work has been encoded (csrc/planner/commit_policy.h). Does not commit while a profiler or signposts
// record, because PyTorch then needs one command buffer for each recorded kernel.
void work_encoded(double predicted_seconds);

// Returns the encoder of PyTorch's own kernels. Call it again after encode_profiled, which may replace the encoder.
id<MTLComputeCommandEncoder> encoder();

// Returns true if torch.mps.profiler is recording kernels.
bool is_profiling();

// Calls `encode` to encode a kernel, and lets torch.mps.profiler record it. A recording profiler adds handlers to the
// command buffer before and after the kernel. macOS 26.4 aborts if an encoder is open at that moment, so this function
// ends the encoder both times. Only a recording profiler reads `tensors`. Exceptions of `encode` are rethrown. A
// profiler that waits for the GPU also raises the errors of earlier work.
void encode_profiled(id<MTLComputePipelineState> pipeline, const std::string& name, at::TensorList tensors,
                     c10::function_ref<void()> encode);

}  // namespace marlin::mps
