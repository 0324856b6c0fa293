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

// Runs the block on the stream's queue with the encoder that PyTorch's own kernels are encoded on; what it throws is
// thrown here. The block must not allocate or copy tensors (dispatch_sync is not re-entrant), commit or wait.
void encode_on_stream(void (^block)(id<MTLComputeCommandEncoder> encoder));

// Inside such a block: what is encoded between construction and destruction is one kernel to torch.mps.profiler.
class ProfiledKernel {
 public:
  ProfiledKernel(id<MTLComputePipelineState> pipeline, const std::string& name, at::TensorList tensors);
  ~ProfiledKernel();
  ProfiledKernel(const ProfiledKernel&) = delete;
  ProfiledKernel& operator=(const ProfiledKernel&) = delete;

 private:
  id<MTLComputePipelineState> pipeline_;
};

}  // namespace marlin::mps
