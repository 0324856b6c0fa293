#include "csrc/mps/pytorch_internals.h"

#import <Foundation/Foundation.h>

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>

#include <exception>

#include "csrc/planner/chips.h"
#include "csrc/planner/commit_policy.h"

namespace marlin::mps {

namespace {

// torch 2.15 adds the stream as an argument of beginProfileKernel and endProfileKernel, and warns if it is missing.
template <typename Profiler, typename... Arguments>
void begin_kernel(Profiler& profiler, at::mps::MPSStream* stream, const Arguments&... arguments) {
  if constexpr (requires { profiler.beginProfileKernel(arguments..., stream); }) {
    profiler.beginProfileKernel(arguments..., stream);
  } else {
    profiler.beginProfileKernel(arguments...);
  }
}

template <typename Profiler>
void end_kernel(Profiler& profiler, at::mps::MPSStream* stream, const void* handle) {
  if constexpr (requires { profiler.endProfileKernel(handle, stream); }) {
    profiler.endProfileKernel(handle, stream);
  } else {
    profiler.endProfileKernel(handle);
  }
}

}  // namespace

id<MTLDevice> device() {
  return at::mps::getCurrentMPSStream()->device();
}

std::string gpu_name() {
  return at::mps::MPSDevice::getInstance()->getName();
}

uint32_t gpu_core_count() {
  return at::mps::MPSDevice::getInstance()->getCoreCount();
}

uint32_t gpu_family() {
  for (uint32_t family = kGpuFamilies.back().number; family >= kGpuFamilies.front().number; --family) {
    // The value of MTLGPUFamilyApple<n> is 1000 + n.
    if ([device() supportsFamily:static_cast<MTLGPUFamily>(1000 + family)]) return family;
  }
  return 0;
}

MetalSystem metal_system() {
  const NSOperatingSystemVersion version = [[NSProcessInfo processInfo] operatingSystemVersion];
  const Version macos{static_cast<uint32_t>(version.majorVersion), static_cast<uint32_t>(version.minorVersion)};
  return {gpu_family(), macos, kTensorSystem.language};
}

id<MTLBuffer> buffer_of(const at::Tensor& tensor) {
  return __builtin_bit_cast(id<MTLBuffer>, const_cast<void*>(tensor.storage().data()));
}

NSUInteger offset_of(const at::Tensor& tensor) {
  return static_cast<NSUInteger>(tensor.storage_offset()) * tensor.element_size();
}

void run_on_queue(void (^block)()) {
  at::mps::dispatch_sync_with_rethrow(at::mps::getCurrentMPSStream()->queue(), ^{
    // An exception that leaves an @autoreleasepool does not drain the pool, so the exception is rethrown after it.
    std::exception_ptr failure;
    @autoreleasepool {
      try {
        block();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  });
}

id<MTLComputeCommandEncoder> encoder() {
  return at::mps::getCurrentMPSStream()->commandEncoder();
}

void commit() {
  at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT);
}

void commit_and_wait() {
  at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
}

void add_completed_handler(MTLCommandBufferHandler handler) {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  stream->endKernelCoalescing();  // macOS 26.4 aborts if a handler is added while an encoder is open
  [stream->commandBuffer() addCompletedHandler:handler];
}

id<MTLCommandBuffer> command_buffer() {
  return [at::mps::getCurrentMPSStream()->commandBuffer() rootCommandBuffer];
}

size_t stream_number() {
  return static_cast<size_t>(at::mps::getCurrentMPSStream()->unwrap().id()) % kStreams;
}

namespace {
thread_local bool commits_are_held = false;
}

void hold_commits(bool held) {
  commits_are_held = held;
}

void work_encoded(double predicted_seconds) {
  static auto* uncommitted = new UncommittedWork;
  if (commits_are_held || is_profiling() || at::mps::getMPSProfiler().isSignpostTracingEnabled()) return;
  if (uncommitted->add(stream_number(), predicted_seconds)) commit();
}

bool is_profiling() {
  return at::mps::getMPSProfiler().isOperationProfilingEnabled();
}

void encode_profiled(id<MTLComputePipelineState> pipeline, const std::string& name, at::TensorList tensors,
                     c10::function_ref<void()> encode) {
  if (is_profiling()) at::mps::getCurrentMPSStream()->endKernelCoalescing();
  begin_kernel(at::mps::getMPSProfiler(), at::mps::getCurrentMPSStream(), static_cast<const void*>(pipeline), name,
               tensors);
  const auto end = [&] {
    if (is_profiling()) at::mps::getCurrentMPSStream()->endKernelCoalescing();
    end_kernel(at::mps::getMPSProfiler(), at::mps::getCurrentMPSStream(), pipeline);
  };
  try {
    encode();
  } catch (...) {
    const std::exception_ptr cause = std::current_exception();
    try {
      end();
    } catch (...) {
      // Drops the error of end(), because the first error is the cause.
    }
    std::rethrow_exception(cause);
  }
  end();
}

}  // namespace marlin::mps
