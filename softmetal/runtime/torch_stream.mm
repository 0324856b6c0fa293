// PyTorch's Metal stream. It implements the installed ATen/mps headers, so that layout and mangled names agree.
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>
#include <c10/metal/error.h>

#include <cstring>
#include <mutex>

#include "metal.h"
#include "torch_device.h"

using softmetal::violation;

// ---- the serial queue ----------------------------------------------------------------------------------------------

@interface SoftMetalDispatchQueue : NSObject <OS_dispatch_queue>
@end
@implementation SoftMetalDispatchQueue
@end

namespace softmetal {
namespace {

std::recursive_mutex queue_mutex;
thread_local bool running_block = false;
uint64_t block_count = 0;

struct ProfiledKernel {
  const void* handle = nullptr;
  std::string label;
};
thread_local ProfiledKernel profiled;

class BlockScope {
 public:
  BlockScope() : lock_(queue_mutex, std::defer_lock) {
    if (running_block) {
      violation("re-entrant dispatch_sync", "dispatch_sync was called from a block of the same queue: a deadlock on a "
                                            "Mac. PyTorch operators on mps tensors do so");
    }
    lock_.lock();
    running_block = true;
    ++block_count;
  }
  ~BlockScope() {
    running_block = false;
    profiled = {};
  }
  BlockScope(const BlockScope&) = delete;
  BlockScope& operator=(const BlockScope&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

}  // namespace

bool on_queue() {
  return running_block;
}
uint64_t queue_block() {
  return block_count;
}
std::string& operator_label() {
  return profiled.label;
}

std::unique_lock<std::recursive_mutex> lock_stream(const char* what) {
  if (running_block) {
    violation("commit inside the block", what,
              " inside a dispatch_sync block: it waits for the queue that runs the block");
  }
  return std::unique_lock(queue_mutex);
}

void raise_new_faults() {
  const std::vector<std::string> faults = Device::get().take_new_faults();
  if (faults.empty()) return;
  std::string text;
  for (const std::string& fault : faults)
    text += (text.empty() ? "" : "\n") + fault;
  TORCH_CHECK(false, text);
}

}  // namespace softmetal

extern "C" __attribute__((visibility("default"))) void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block) {
  (void)queue;
  const softmetal::BlockScope scope;
  try {
    block();
  } catch (const std::exception& error) {
    violation("exception across dispatch_sync",
              "a C++ exception left the block of a plain dispatch_sync, which ends a "
              "Mac's process; use dispatch_sync_with_rethrow. It said: ",
              error.what());
  }
}

namespace at::mps {

void dispatch_sync_with_rethrow(dispatch_queue_t queue, void (^block)()) {
  (void)queue;
  const softmetal::BlockScope scope;
  block();
  if (softmetal::profiled.handle != nullptr) {
    violation("profiler pairing", "beginProfileKernel without endProfileKernel in the block");
  }
}

// ---- stream --------------------------------------------------------------------------------------------------------

MPSStream::MPSStream(Stream stream)
    : _stream(stream),
      _commandQueue([MTLCreateSystemDefaultDevice() newCommandQueue]),
      _serialQueue([[SoftMetalDispatchQueue alloc] init]) {
  TORCH_CHECK(stream.device_type() == DeviceType::MPS, "expected an MPS stream, got ", stream);
}
MPSStream::~MPSStream() = default;

MPSCommandBuffer* MPSStream::commandBuffer() {
  if (_commandBuffer == nil) {
    @autoreleasepool {
      _commandBuffer = [[MPSCommandBuffer commandBufferFromCommandQueue:_commandQueue] retain];
    }
  }
  return _commandBuffer;
}

id<MTLComputeCommandEncoder> MPSStream::commandEncoder() {
  if (!softmetal::on_queue()) {
    violation("encoder outside the queue",
              "commandEncoder() was called outside a dispatch_sync block of the stream's queue");
  }
  if (_commandEncoder == nil) {
    @autoreleasepool {
      _commandEncoder = [[commandBuffer() computeCommandEncoder] retain];
    }
  }
  return _commandEncoder;
}

void MPSStream::endKernelCoalescing() {
  if (_commandEncoder == nil) return;
  static_cast<SoftMetalCommandBuffer*>([_commandBuffer rootCommandBuffer])->needsQueue =
      NO;  // the device itself ends this encoder
  [_commandEncoder endEncoding];
  static_cast<SoftMetalCommandBuffer*>([_commandBuffer rootCommandBuffer])->needsQueue = YES;
  [_commandEncoder release];
  _commandEncoder = nil;
}

void MPSStream::commit() {
  endKernelCoalescing();
  if (_commandBuffer == nil) return;
  [_commandBuffer commit];
  [_prevCommandBuffer release];
  _prevCommandBuffer = _commandBuffer;
  _commandBuffer = nil;
}

void MPSStream::commitAndWait() {
  commit();
  if (_prevCommandBuffer != nil) {
    [_prevCommandBuffer waitUntilCompleted];
    [_prevCommandBuffer release];
    _prevCommandBuffer = nil;
  }
  softmetal::raise_new_faults();
  checkLastError();
}

void MPSStream::commitAndContinue() {
  commit();
}
void MPSStream::flush() {
  commit();
}

void MPSStream::synchronize(SyncType syncType) {
  const auto lock = softmetal::lock_stream("MPSStream::synchronize");
  switch (syncType) {
    case SyncType::NONE:
    case SyncType::COMMIT_ADAPTIVE:
      break;  // PyTorch commits here only under memory pressure
    case SyncType::COMMIT:
    case SyncType::COMMIT_AND_CONTINUE:
      commit();
      break;
    case SyncType::COMMIT_AND_WAIT:
      commitAndWait();
      break;
  }
}

void MPSStream::copy(id<MTLBuffer> source, id<MTLBuffer> destination, size_t length, size_t sourceOffset,
                     size_t destinationOffset, uint64_t profileId, SyncType syncType) {
  (void)profileId;
  dispatch_sync_with_rethrow(_serialQueue, ^{
    @autoreleasepool {
      endKernelCoalescing();
      id<MTLBlitCommandEncoder> encoder = [commandBuffer() blitCommandEncoder];
      const std::unique_ptr<id<MTLBlitCommandEncoder>, void (*)(id<MTLBlitCommandEncoder>*)> ended(
          &encoder, [](id<MTLBlitCommandEncoder>* e) { [*e endEncoding]; });
      [encoder copyFromBuffer:source
                 sourceOffset:sourceOffset
                     toBuffer:destination
            destinationOffset:destinationOffset
                         size:length];
    }
  });
  synchronize(syncType);
}

void MPSStream::copy_and_sync(id<MTLBuffer> source, id<MTLBuffer> destination, size_t length, size_t sourceOffset,
                              size_t destinationOffset, bool non_blocking, uint64_t profileId) {
  copy(source, destination, length, sourceOffset, destinationOffset, profileId,
       non_blocking ? SyncType::COMMIT : SyncType::COMMIT_AND_WAIT);
}

void MPSStream::executeMPSGraph(MPSGraph*, NSDictionary*, NSDictionary*, SyncType) {
  TORCH_CHECK(false, "softmetal: there is no MPSGraph; host code encodes its own kernels");
}

void MPSStream::addCompletedHandler(MTLCommandBufferHandler block) {
  [commandBuffer() addCompletedHandler:block];
}

id<MTLDevice> MPSStream::device() const {
  return MPSDevice::getInstance()->device();
}

id<MTLBuffer> MPSStream::getErrorBuffer() {
  if (_errorBuffer == nil) {
    constexpr NSUInteger bytes = sizeof(c10::metal::ErrorMessages);
    _errorBuffer = [device() newBufferWithLength:bytes options:MTLResourceStorageModeShared];
    std::memset([_errorBuffer contents], 0, bytes);
  }
  return _errorBuffer;
}

void MPSStream::checkLastError() {
  if (_errorBuffer == nil) return;
  auto* messages = static_cast<c10::metal::ErrorMessages*>([_errorBuffer contents]);
  if (messages->count == 0) return;
  messages->count = 0;
  const c10::metal::ErrorMessage& first = messages->msg[0];
  throw c10::AcceleratorError({first.func, first.file, first.line}, 1, first.message);
}

MPSStream* MPSStreamImpl::_stream = nullptr;
MPSStream* MPSStreamImpl::getInstance() {
  static std::once_flag once;
  std::call_once(once, [] { _stream = new MPSStream(Stream(Stream::DEFAULT, Device(DeviceType::MPS, 0))); });
  return _stream;
}
MPSStream* getCurrentMPSStream() {
  return MPSStreamImpl::getInstance();
}
MPSStream* getDefaultMPSStream() {
  return MPSStreamImpl::getInstance();
}

// ---- device --------------------------------------------------------------------------------------------------------

MPSDevice* MPSDevice::_device = nullptr;
MPSDevice::MPSDevice() : _mtl_device(MTLCreateSystemDefaultDevice()) {}
MPSDevice::~MPSDevice() = default;
MPSDevice* MPSDevice::getInstance() {
  static std::once_flag once;
  std::call_once(once, [] { _device = new MPSDevice(); });
  return _device;
}
bool MPSDevice::isMacOS13Plus(MacOSVersion version) const {
  return version == MacOSVersion::MACOS_VER_14_4_PLUS;
}
std::string MPSDevice::getName() const {
  return [[_mtl_device name] UTF8String];
}
unsigned MPSDevice::getCoreCount() const {
  return softmetal::kCoreCount;
}
bool is_available() {
  return true;
}
bool is_macos_13_or_newer(MacOSVersion version) {
  return MPSDevice::getInstance()->isMacOS13Plus(version);
}
bool is_apple_family_or_newer(AppleGPUFamily family) {
  return family == AppleGPUFamily::APPLE_7_PLUS;
}

// ---- profiler ------------------------------------------------------------------------------------------------------

namespace Profiler {

MPSProfiler::MPSProfiler() : m_os_log_events(nullptr), m_os_log_intervals(nullptr) {}
MPSProfiler::~MPSProfiler() = default;

namespace {

// A profiler that records adds handlers to the command buffer. macOS 26.4 aborts if an encoder is open then.
void add_handler(const char* caller) {
  const auto* buffer = static_cast<SoftMetalCommandBuffer*>([getCurrentMPSStream()->commandBuffer() rootCommandBuffer]);
  if (buffer->openEncoder != nil) {
    violation("handler beside an open encoder", caller,
              " with a compute encoder open: end it first (MPSStream::endKernelCoalescing)");
  }
}

}  // namespace

void MPSProfiler::StartTrace(const std::string& mode, bool waitUntilCompleted) {
  (void)mode;
  (void)waitUntilCompleted;
  m_signpost_types = SignpostTypes::RUN_OPERATION;
}

void MPSProfiler::StopTrace() {
  m_signpost_types = SignpostTypes::SIGNPOST_NONE;
}

uint64_t MPSProfiler::beginProfileKernel(const void* handle, const std::string& name, bool isGraph) {
  (void)isGraph;
  if (isOperationProfilingEnabled()) add_handler("beginProfileKernel");
  if (handle == nullptr) violation("profiler pairing", "beginProfileKernel '", name, "': the handle is null");
  if (softmetal::profiled.handle != nullptr) {
    violation("profiler pairing", "beginProfileKernel '", name, "' before endProfileKernel of '",
              softmetal::profiled.label, "'");
  }
  softmetal::profiled = {handle, name};
  return ++m_kernel_counter;
}

uint64_t MPSProfiler::beginProfileKernel(const void* handle, const std::string& name, const TensorList& tensors) {
  (void)tensors;
  return beginProfileKernel(handle, name, false);
}

void MPSProfiler::endProfileKernel(const void* handle, SyncType syncType) {
  (void)syncType;
  if (handle == nullptr || handle != softmetal::profiled.handle) {
    violation("profiler pairing", "endProfileKernel with another handle than beginProfileKernel's");
  }
  softmetal::profiled = {};
  if (!isOperationProfilingEnabled()) return;
  add_handler("endProfileKernel");
  // As in PyTorch's dylibs: the completed handler is followed by synchronize(), which ends the encoder whatever its
  // type.
  getCurrentMPSStream()->endKernelCoalescing();
}

}  // namespace Profiler

Profiler::MPSProfiler& getMPSProfiler() {
  static auto* profiler = new Profiler::MPSProfiler();
  return *profiler;
}

}  // namespace at::mps
