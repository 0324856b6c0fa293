// Helpers of the scenarios: sources, pipelines, buffers, and functions that encode as an operator does.
#pragma once

#include <ATen/Functions.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>
#include <Metal/Metal.h>
#include <torch/mps.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace host {

using Encoder = id<MTLComputeCommandEncoder>;

inline constexpr const char* kSource = R"(
#include <metal_stdlib>
using namespace metal;
kernel void scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant float& factor [[buffer(2)]],
                  uint i [[thread_position_in_grid]]) { y[i] = factor * x[i]; }
kernel void shared(device float* y [[buffer(0)]], threadgroup float* scratch [[threadgroup(0)]],
                   uint i [[thread_position_in_threadgroup]]) {
  scratch[i] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = scratch[i];
}
kernel void declared(device float* y [[buffer(0)]], threadgroup float* more [[threadgroup(0)]],
                     uint i [[thread_position_in_threadgroup]]) {
  threadgroup float scratch[6144];
  scratch[i] = more[0];
  y[i] = scratch[i];
}
[[max_total_threads_per_threadgroup(64)]] kernel void narrow(device float* y [[buffer(0)]],
                                                             uint i [[thread_position_in_grid]]) { y[i] = 1; }
kernel void vectors(device float4* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = float4(1); }
)";

inline constexpr const char* kConstants = R"(
#include <metal_stdlib>
using namespace metal;
constant uint width [[function_constant(0)]];
constant bool negate [[function_constant(1)]];
kernel void fill(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i] = (negate ? -1.0f : 1.0f) * float(width) + OFFSET;
}
)";

inline std::string text_of(NSError* error) {
  return error == nil ? "no error" : [[error localizedDescription] UTF8String];
}

inline id<MTLDevice> device() {
  return at::mps::MPSDevice::getInstance()->device();
}

inline id<MTLComputePipelineState> pipeline(const char* name) {
  static id<MTLLibrary> library = nil;
  NSError* error = nil;
  if (library == nil) {
    MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
    [options setMathMode:MTLMathModeSafe];
    [options setLanguageVersion:MTLLanguageVersion3_1];
    library = [device() newLibraryWithSource:[NSString stringWithUTF8String:kSource] options:options error:&error];
    if (library == nil) throw std::runtime_error(text_of(error));
  }
  id<MTLFunction> function = [[library newFunctionWithName:[NSString stringWithUTF8String:name]] autorelease];
  if (function == nil) throw std::runtime_error(std::string("no function ") + name);
  id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
  if (state == nil) throw std::runtime_error(text_of(error));
  return [state autorelease];
}

inline id<MTLBuffer> buffer(NSUInteger bytes) {
  id<MTLBuffer> made = [device() newBufferWithLength:bytes options:MTLResourceStorageModeShared];
  return [made autorelease];
}

inline id<MTLBuffer> zeros(NSUInteger bytes) {
  id<MTLBuffer> made = buffer(bytes);
  std::memset([made contents], 0, bytes);
  return made;
}

// Runs `body` in a block of the stream's queue with the shared encoder, as an operator does.
inline void encode(const std::function<void(Encoder)>& body) {
  auto* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    @autoreleasepool {
      body(stream->commandEncoder());
    }
  });
}

using Blit = id<MTLBlitCommandEncoder>;

// Runs `body` with an encoder for copies, on a command buffer outside PyTorch's stream.
inline void blit(const std::function<void(Blit)>& body) {
  @autoreleasepool {
    Blit encoder = [[[[device() newCommandQueue] autorelease] commandBuffer] blitCommandEncoder];
    try {
      body(encoder);
    } catch (...) {
      [encoder endEncoding];
      throw;
    }
    [encoder endEncoding];
  }
}

inline void copy(Blit e, id<MTLBuffer> source, NSUInteger from, id<MTLBuffer> to, NSUInteger at, NSUInteger bytes) {
  [e copyFromBuffer:source sourceOffset:from toBuffer:to destinationOffset:at size:bytes];
}

inline void wait() {
  at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
}

inline void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string("expected ") + what);
}

inline void bind_scale(Encoder e, id<MTLBuffer> x, id<MTLBuffer> y, float factor) {
  [e setComputePipelineState:pipeline("scale")];
  [e setBuffer:x offset:0 atIndex:0];
  [e setBuffer:y offset:0 atIndex:1];
  [e setBytes:&factor length:sizeof factor atIndex:2];
}

inline void dispatch(Encoder e, NSUInteger threads, NSUInteger group) {
  [e dispatchThreads:MTLSizeMake(threads, 1, 1) threadsPerThreadgroup:MTLSizeMake(group, 1, 1)];
}

using Scenarios = std::map<std::string, std::function<void()>>;
inline Scenarios& scenarios() {
  static auto* all = new Scenarios();
  return *all;
}
inline bool add(Scenarios more) {
  scenarios().merge(more);
  return true;
}

}  // namespace host
