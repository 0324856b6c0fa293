#include "csrc/mps/stream.h"

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>

namespace marlin::mps {

id<MTLDevice> device() {
  return at::mps::getCurrentMPSStream()->device();
}

std::string gpu_name() {
  return at::mps::MPSDevice::getInstance()->getName();
}

uint32_t gpu_core_count() {
  return at::mps::MPSDevice::getInstance()->getCoreCount();
}

id<MTLBuffer> buffer_of(const at::Tensor& tensor) {
  return __builtin_bit_cast(id<MTLBuffer>, const_cast<void*>(tensor.storage().data()));
}

NSUInteger offset_of(const at::Tensor& tensor) {
  return static_cast<NSUInteger>(tensor.storage_offset()) * tensor.element_size();
}

void run_on_queue(void (^block)()) {
  at::mps::dispatch_sync_with_rethrow(at::mps::getCurrentMPSStream()->queue(), ^{
    @autoreleasepool {
      block();
    }
  });
}

id<MTLComputeCommandEncoder> encoder() {
  return at::mps::getCurrentMPSStream()->commandEncoder();
}

bool is_profiling() {
  return at::mps::getMPSProfiler().isOperationProfilingEnabled();
}

ProfiledKernel::ProfiledKernel(id<MTLComputePipelineState> pipeline, const std::string& name, at::TensorList tensors)
    : pipeline_(pipeline) {
  if (is_profiling()) at::mps::getCurrentMPSStream()->endKernelCoalescing();
  at::mps::getMPSProfiler().beginProfileKernel(pipeline_, name, tensors);
}

ProfiledKernel::~ProfiledKernel() {
  if (is_profiling()) at::mps::getCurrentMPSStream()->endKernelCoalescing();
  at::mps::getMPSProfiler().endProfileKernel(pipeline_);
}

}  // namespace marlin::mps
