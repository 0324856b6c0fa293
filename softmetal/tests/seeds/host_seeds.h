// Helpers of the seeds in host code: kernels, buffers, and functions that encode and wait. `add_seeds` registers the
// seeds of a file. A seed is a function that computes numbers. Its argument `good` selects the code without the fault.
#pragma once

#include "../host/host.h"

namespace host {

inline constexpr NSUInteger kCount = 16;
inline constexpr NSUInteger kBytes = kCount * sizeof(float);

inline constexpr const char* kSeedSource = R"(
#include <metal_stdlib>
using namespace metal;
struct Params { uint n; float4 v; };
struct Pair { float a; float b; };
kernel void copy(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
kernel void bounded(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) { if (i < 16) y[i] = x[i]; }
kernel void reverse(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) { y[i] = x[15 - i]; }
kernel void plane(device float* y [[buffer(0)]], uint2 p [[thread_position_in_grid]]) { y[p.y * 8 + p.x] = p.x; }
kernel void structure(constant Params& p [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = p.v.x + p.n; }
kernel void pair(constant Pair& p [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = p.a - p.b; }
kernel void staged(device float* y [[buffer(0)]], threadgroup float* t [[threadgroup(0)]],
                   uint i [[thread_position_in_threadgroup]]) {
  t[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = t[15 - i];
}
struct Table { device float* x; device float* y; };
kernel void table(device const Table& t [[buffer(0)]], uint i [[thread_position_in_grid]]) { t.y[i] = t.x[i] + 1; }
kernel void nan(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                uint i [[thread_position_in_grid]]) { float v = x[i] / x[i]; y[i] = v != v ? 1.0f : 2.0f; }
)";

inline id<MTLLibrary> library_of(const char* source, BOOL safe = YES,
                                 MTLLanguageVersion version = MTLLanguageVersion3_1) {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  if (safe) [options setMathMode:MTLMathModeSafe];
  [options setLanguageVersion:version];
  NSError* error = nil;
  id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:source]
                                                  options:options
                                                    error:&error];
  if (library == nil) throw std::runtime_error(text_of(error));
  return library;
}

inline id<MTLComputePipelineState> state_of(id<MTLFunction> function) {
  NSError* error = nil;
  id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
  if (state == nil) throw std::runtime_error(text_of(error));
  return state;
}

inline id<MTLComputePipelineState> kernel(const char* name, BOOL safe = YES) {
  static std::map<std::pair<std::string, BOOL>, id<MTLComputePipelineState>> known;
  id<MTLComputePipelineState>& state = known[{name, safe}];
  if (state == nil) {
    static std::map<BOOL, id<MTLLibrary>> libraries;
    if (libraries[safe] == nil) libraries[safe] = library_of(kSeedSource, safe);
    state = state_of([libraries[safe] newFunctionWithName:[NSString stringWithUTF8String:name]]);
  }
  return state;
}

inline id<MTLComputePipelineState> constants(const std::function<void(MTLFunctionConstantValues*)>& set) {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  NSMutableDictionary* macros = [NSMutableDictionary dictionary];
  [macros setObject:@"0.0f" forKey:@"OFFSET"];
  [options setPreprocessorMacros:macros];
  NSError* error = nil;
  id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:kConstants]
                                                  options:options
                                                    error:&error];
  if (library == nil) throw std::runtime_error(text_of(error));
  MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
  set(values);
  id<MTLFunction> function = [library newFunctionWithName:@"fill" constantValues:values error:&error];
  if (function == nil) throw std::runtime_error(text_of(error));
  return state_of(function);
}

using Values = std::vector<float>;

inline Values read(id<MTLBuffer> buffer, NSUInteger count = kCount) {
  const auto* numbers = static_cast<const float*>([buffer contents]);
  return {numbers, numbers + count};
}

inline id<MTLBuffer> numbers(NSUInteger count = kCount) {
  id<MTLBuffer> made = buffer(count * sizeof(float));
  for (NSUInteger i = 0; i < count; ++i)
    static_cast<float*>([made contents])[i] = static_cast<float>(i + 1);
  return made;
}

inline id<MTLBuffer> storage(const at::Tensor& tensor) {
  return static_cast<id<MTLBuffer>>(const_cast<void*>(tensor.storage().data()));
}

inline void bind(Encoder e, const char* name, id<MTLBuffer> x, id<MTLBuffer> y) {
  [e setComputePipelineState:kernel(name)];
  [e setBuffer:x offset:0 atIndex:0];
  [e setBuffer:y offset:0 atIndex:1];
}

// Encodes `body` on a queue outside of PyTorch's streams. If no queue is given, uses a new queue.
inline id<MTLCommandBuffer> own(const std::function<void(Encoder)>& body, id<MTLCommandQueue> queue = nil) {
  if (queue == nil) queue = [[device() newCommandQueue] autorelease];
  id<MTLCommandBuffer> commands = [queue commandBuffer];
  Encoder e = [commands computeCommandEncoder];
  try {
    body(e);
  } catch (...) {
    [e endEncoding];
    throw;
  }
  [e endEncoding];
  return commands;
}

inline void run(id<MTLCommandBuffer> commands) {
  [commands commit];
  [commands waitUntilCompleted];
}

inline Values finished(id<MTLBuffer> y, NSUInteger count = kCount) {
  wait();  // throws if checked mode found a fault
  return read(y, count);
}

// Encodes `body` with 16 numbers in x and an empty y. `body` must copy x to y. Returns y.
inline Values copied(const std::function<void(Encoder, id<MTLBuffer>, id<MTLBuffer>)>& body) {
  id<MTLBuffer> x = numbers(), y = buffer(kBytes);
  encode([&](Encoder e) { body(e, x, y); });
  return finished(y);
}

inline Values addressed(const std::function<void(Encoder, id<MTLBuffer>, id<MTLBuffer>)>& reside) {
  id<MTLBuffer> x = numbers(), y = zeros(kBytes), table = buffer(16);
  static_cast<uint64_t*>([table contents])[0] = [x gpuAddress];
  static_cast<uint64_t*>([table contents])[1] = [y gpuAddress];
  encode([&](Encoder e) {
    reside(e, x, y);
    [e setComputePipelineState:kernel("table")];
    [e setBuffer:table offset:0 atIndex:0];
    dispatch(e, kCount, kCount);
  });
  return finished(y);
}

using Seeds = std::map<std::string, std::function<Values(bool good)>>;
inline Seeds& seeds() {
  static auto* all = new Seeds();
  return *all;
}
inline bool add_seeds(Seeds more) {
  seeds().merge(more);
  return true;
}

}  // namespace host
