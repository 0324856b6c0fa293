// An operator for PyTorch's mps device: out = a x + y. The same file also compiles on a Mac.
#import <Metal/Metal.h>

#include <ATen/ATen.h>
#include <ATen/mps/MPSStream.h>
#include <torch/library.h>

static NSString* const kSource = @R"(
kernel void saxpy(device const float* x, device const float* y, device float* out, constant float& a,
                  uint i [[thread_position_in_grid]]) {
  out[i] = a * x[i] + y[i];
})";

static void bind(id<MTLComputeCommandEncoder> encoder, const at::Tensor& tensor, NSUInteger index) {
  auto buffer = __builtin_bit_cast(id<MTLBuffer>, const_cast<void*>(tensor.storage().data()));
  [encoder setBuffer:buffer offset:tensor.storage_offset() * tensor.element_size() atIndex:index];
}

static at::Tensor saxpy(double a, const at::Tensor& x, const at::Tensor& y) {
  for (const at::Tensor& t : {x, y})
    TORCH_CHECK(t.scalar_type() == at::kFloat && t.is_contiguous() && t.sizes() == x.sizes(), "saxpy: bad input");
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  static id<MTLLibrary> library = [stream->device() newLibraryWithSource:kSource options:nil error:nil];
  static id<MTLComputePipelineState> pipeline =
      [stream->device() newComputePipelineStateWithFunction:[library newFunctionWithName:@"saxpy"] error:nil];
  at::Tensor out = at::empty_like(x);
  const float factor = a;
  dispatch_sync(stream->queue(), ^{
    id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
    [encoder setComputePipelineState:pipeline];
    bind(encoder, x, 0);
    bind(encoder, y, 1);
    bind(encoder, out, 2);
    [encoder setBytes:&factor length:sizeof factor atIndex:3];
    [encoder dispatchThreads:MTLSizeMake(x.numel(), 1, 1) threadsPerThreadgroup:MTLSizeMake(256, 1, 1)];
  });
  return out;
}

TORCH_LIBRARY(saxpy, m) {
  m.def("saxpy(float a, Tensor x, Tensor y) -> Tensor");
}
TORCH_LIBRARY_IMPL(saxpy, MPS, m) {
  m.impl("saxpy", &saxpy);
}
