// PyTorch's MPS stream, device, tensors and profiler. Only pytorch_internals.mm includes PyTorch's private MPS headers,
// so a new version of torch needs changes only in that file.
#pragma once

#import <Metal/Metal.h>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <string>
#include <vector>

#include "csrc/planner/device.h"

namespace marlin::mps {

id<MTLDevice> device();
std::string gpu_name();  // e.g. "Apple M1 Max"
uint32_t gpu_core_count();
uint32_t gpu_family();  // n of the newest family Apple<n> that both this package knows and Metal reports; 0 if none

// The GPU's family, the version of macOS, and the newest version of Metal's language that this package asks for.
MetalSystem metal_system();

// The buffer belongs to the tensor's storage, and no reference is added. The offset is in bytes.
id<MTLBuffer> buffer_of(const at::Tensor& tensor);
NSUInteger offset_of(const at::Tensor& tensor);

// Runs the block on the stream's queue. Rethrows the block's exception. The block must not allocate or copy tensors,
// because both use the queue, and dispatch_sync is not re-entrant. It may commit and wait with the functions below.
void run_on_queue(void (^block)());

// For use inside a block of run_on_queue: ends the encoder and gives the encoded work to the GPU. commit_and_wait()
// also waits for that work. Do not use the encoder or the command buffer after either function.
void commit();
void commit_and_wait();

// For use inside a block of run_on_queue: ends the encoder and adds a handler to the current command buffer. The
// handler is called when the GPU has completed all work that is encoded up to the next commit.
void add_completed_handler(MTLCommandBufferHandler handler);

// For use inside a block of run_on_queue: the command buffer that is being filled, and the number of the stream, which
// is below kStreams. A commit replaces the command buffer.
id<MTLCommandBuffer> command_buffer();
size_t stream_number();

// For use inside a block of run_on_queue, after its last kernel: commits if enough work has been encoded
// (csrc/planner/commit_policy.h). Does not commit if this thread has called hold_commits(true). Does not commit while a
// profiler or signposts record: PyTorch then needs one command buffer for each recorded kernel.
void work_encoded(double predicted_seconds);
void hold_commits(bool held);

// Returns the encoder that PyTorch's own kernels use. Call it only inside a block of run_on_queue. encode_profiled may
// replace the encoder.
id<MTLComputeCommandEncoder> encoder();

// Returns true if torch.mps.profiler is recording kernels.
bool is_profiling();

// Calls `encode` to encode a kernel; torch.mps.profiler records the call as one kernel. Call this function only inside
// a block of run_on_queue. A recording profiler adds a handler to the command buffer at the kernel's begin and at its
// end. macOS 26.4 aborts if an encoder is open then, so the encoder is ended first both times. `tensors` are read only
// by a recording profiler. Throws what `encode` throws. A profiler that waits for the GPU also raises the errors of
// earlier work.
void encode_profiled(id<MTLComputePipelineState> pipeline, const std::string& name, at::TensorList tensors,
                     c10::function_ref<void()> encode);

}  // namespace marlin::mps
