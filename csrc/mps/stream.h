// PyTorch's MPS stream, device, tensors and profiler. All use of PyTorch's private MPS headers is behind this file, so
// that a new torch version is this file's work.
#pragma once

#import <Metal/Metal.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace marlin::mps {

id<MTLDevice> device();
std::string gpu_name();  // "Apple M1 Max"
uint32_t gpu_core_count();

// A tensor's buffer belongs to the tensor's storage: no reference is added. The offset is in bytes.
id<MTLBuffer> buffer_of(const at::Tensor& tensor);
NSUInteger offset_of(const at::Tensor& tensor);

// Runs the block on the stream's queue and rethrows what it throws. The block must not allocate or copy tensors
// (dispatch_sync is not re-entrant), commit or wait.
void run_on_queue(void (^block)());

// Inside such a block: the encoder that PyTorch's own kernels are encoded on. It may be another object after each
// ProfiledKernel.
id<MTLComputeCommandEncoder> encoder();

// Whether torch.mps.profiler records kernels.
bool is_profiling();

// Inside such a block: everything encoded between construction and destruction is one kernel to torch.mps.profiler.
// A profiler that records adds handlers to the command buffer and ends PyTorch's encoder when the kernel ends.
// macOS 26.4 aborts if a handler is added while an encoder is open, so the encoder is ended before that on both sides.
class ProfiledKernel {
 public:
  // `tensors` are only read by a profiler that records.
  ProfiledKernel(id<MTLComputePipelineState> pipeline, const std::string& name, at::TensorList tensors);
  ~ProfiledKernel();
  ProfiledKernel(const ProfiledKernel&) = delete;
  ProfiledKernel& operator=(const ProfiledKernel&) = delete;

 private:
  id<MTLComputePipelineState> pipeline_;
};

}  // namespace marlin::mps
