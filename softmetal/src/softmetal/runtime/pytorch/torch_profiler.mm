// PyTorch's profiler of kernels. beginProfileKernel and the following endProfileKernel belong to the same block of the
// queue.
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>

#include "../metal.h"
#include "torch_device.h"

using softmetal::violation;

namespace softmetal {

ProfiledKernel& profiled_kernel() {
  thread_local ProfiledKernel kernel;
  return kernel;
}
std::string& operator_label() {
  return profiled_kernel().label;
}

}  // namespace softmetal

namespace at::mps {

namespace Profiler {

MPSProfiler::MPSProfiler() : m_os_log_events(nullptr), m_os_log_intervals(nullptr) {}
MPSProfiler::~MPSProfiler() = default;

namespace {

// While the profiler records, it adds handlers to the command buffer. macOS 26.4 aborts if an encoder is open then.
void add_handler(MPSStream& stream, const char* caller) {
  const auto* buffer = static_cast<SoftMetalCommandBuffer*>([stream.commandBuffer() rootCommandBuffer]);
  if (buffer->openEncoder != nil) {
    violation("handler beside an open encoder", caller,
              " with a compute encoder open: end it first (MPSStream::endKernelCoalescing)");
  }
}

void begin_kernel(MPSStream& stream, const void* handle, const std::string& name, bool records) {
  if (records) add_handler(stream, "beginProfileKernel");
  if (handle == nullptr) violation("profiler pairing", "beginProfileKernel '", name, "': the handle is null");
  if (softmetal::profiled_kernel().handle != nullptr) {
    violation("profiler pairing", "beginProfileKernel '", name, "' before endProfileKernel of '",
              softmetal::profiled_kernel().label, "'");
  }
  softmetal::profiled_kernel() = {handle, name};
}

void end_kernel(MPSStream& stream, const void* handle, bool records, SyncType type) {
  if (handle == nullptr || handle != softmetal::profiled_kernel().handle) {
    violation("profiler pairing", "endProfileKernel with another handle than beginProfileKernel's");
  }
  softmetal::profiled_kernel() = {};
  if (!records) return;
  add_handler(stream, "endProfileKernel");
  // After adding the completed handler, PyTorch calls synchronize(), which ends the encoder for every SyncType.
  stream.synchronize(type);
}

}  // namespace

void MPSProfiler::StartTrace(const std::string& mode, bool waitUntilCompleted) {
  (void)mode;
  m_signpost_types = SignpostTypes::RUN_OPERATION;
  m_profile_options = waitUntilCompleted ? ProfileOptions::WAIT_UNTIL_COMPLETED : 0;
}

void MPSProfiler::StopTrace() {
  m_signpost_types = SignpostTypes::SIGNPOST_NONE;
}

uint64_t MPSProfiler::beginProfileKernel(const void* handle, const std::string& name, bool isGraph) {
  (void)isGraph;
  begin_kernel(*getCurrentMPSStream(), handle, name, isOperationProfilingEnabled());
  return ++m_kernel_counter;
}

uint64_t MPSProfiler::beginProfileKernel(const void* handle, const std::string& name, const TensorList& tensors) {
  (void)tensors;
  return beginProfileKernel(handle, name, false);
}

void MPSProfiler::endProfileKernel(const void* handle, SyncType syncType) {
  const bool waits = (m_profile_options & ProfileOptions::WAIT_UNTIL_COMPLETED) != 0;
  end_kernel(*getCurrentMPSStream(), handle, isOperationProfilingEnabled(),
             waits ? SyncType::COMMIT_AND_WAIT : syncType);
}

#if SOFTMETAL_TORCH_2(15)
uint64_t MPSProfiler::beginProfileKernel(const void* handle, const std::string& name, bool isGraph, MPSStream* stream) {
  (void)isGraph;
  begin_kernel(stream == nullptr ? *getDefaultMPSStream() : *stream, handle, name, isOperationProfilingEnabled());
  return ++m_kernel_counter;
}

uint64_t MPSProfiler::beginProfileKernel(const void* handle, const std::string& name, const TensorList& tensors,
                                         MPSStream* stream) {
  (void)tensors;
  return beginProfileKernel(handle, name, false, stream);
}

void MPSProfiler::endProfileKernel(const void* handle, MPSStream* stream, SyncType syncType) {
  const bool waits = (m_profile_options & ProfileOptions::WAIT_UNTIL_COMPLETED) != 0;
  end_kernel(stream == nullptr ? *getDefaultMPSStream() : *stream, handle, isOperationProfilingEnabled(),
             waits ? SyncType::COMMIT_AND_WAIT : syncType);
}
#endif

}  // namespace Profiler

Profiler::MPSProfiler& getMPSProfiler() {
  static auto* profiler = new Profiler::MPSProfiler();
  return *profiler;
}

}  // namespace at::mps
