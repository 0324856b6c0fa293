// PyTorch's Metal streams. This file implements the installed ATen/mps headers, so that layouts and mangled names are
// the same. Each function makes the same calls as PyTorch's function for the Mac; apple/recorded_pytorch_calls.json
// lists these calls.
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#include <c10/metal/error.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "../metal.h"
#include "torch_device.h"

using softmetal::violation;

namespace softmetal {
namespace {

struct Streams {
  std::mutex mutex;
  std::map<int64_t, at::mps::MPSStream*> pool;  // by number, without the default stream (number 0)
};
Streams& streams() {
  static auto* instance = new Streams();
  return *instance;
}

// Each thread has a current stream, as in torch 2.14 and later. Null is the default stream, the only one of torch 2.13.
thread_local at::mps::MPSStream* current_stream = nullptr;

StreamCounts counts;  // guarded by the queues' lock

SoftMetalCommandBuffer* root_of(MPSCommandBuffer* buffer) {
  return static_cast<SoftMetalCommandBuffer*>([buffer rootCommandBuffer]);
}

// Called before PyTorch's stream commits its command buffer.
void count_commit(MPSCommandBuffer* buffer) {
  SoftMetalCommandBuffer* root = root_of(buffer);
  root->needsQueue = NO;  // PyTorch's stream may commit inside and outside a block of the queue
  const uint64_t commands = encoded(*root->commands);
  ++(commands == 0 ? counts.empty_commits : counts.commits);
  counts.most_in_a_commit = std::max(counts.most_in_a_commit, commands);
}

}  // namespace

at::mps::MPSStream* stream_of_number(int64_t number) {
  TORCH_CHECK(0 <= number && number <= kPoolStreams, "softmetal: stream: expected 0 to ", kPoolStreams, ", got ",
              number);
  if (number == 0) return at::mps::getDefaultMPSStream();
  const std::lock_guard lock(streams().mutex);
  at::mps::MPSStream*& stream = streams().pool[number];
  const c10::Device device(c10::DeviceType::MPS, 0);
  if (stream == nullptr) stream = new at::mps::MPSStream(c10::Stream(c10::Stream::UNSAFE, device, number));
  return stream;
}

void set_current_stream(int64_t number) {
  current_stream = stream_of_number(number);
}

int64_t current_stream_number() {
  return current_stream == nullptr ? 0 : current_stream->unwrap().id();
}

void for_each_stream(const std::function<void(at::mps::MPSStream&)>& visit) {
  std::vector<at::mps::MPSStream*> all{at::mps::getDefaultMPSStream()};
  {
    const std::lock_guard lock(streams().mutex);
    for (const auto& [number, stream] : streams().pool)
      all.push_back(stream);
  }
  for (at::mps::MPSStream* stream : all)
    visit(*stream);
}

StreamCounts stream_counts() {
  const auto lock = lock_queues();
  StreamCounts found = counts;
  for_each_stream(
      [&](at::mps::MPSStream& stream) { found.uncommitted += encoded(*root_of(stream.commandBuffer())->commands); });
  return found;
}

void write_later(Memory& memory, std::function<void()> write) {
  auto command = std::make_unique<Command>(Command::Kind::deferred_write);
  command->deferred = std::make_shared<DeferredWrite>(std::move(write));
  memory.expect(command->deferred);
  const auto lock = lock_queues();
  auto* stream = at::mps::getCurrentMPSStream();
  stream->endKernelCoalescing();
  root_of(stream->commandBuffer())->commands->push_back(std::move(command));
}

void raise_new_faults() {
  for (const std::string& warning : Device::get().take_warnings())
    TORCH_WARN("software Metal device: ", warning);
  const std::vector<std::string> faults = Device::get().take_new_faults();
  if (faults.empty()) return;
  std::string text;
  for (const std::string& fault : faults)
    text += (text.empty() ? "" : "\n") + fault;
  TORCH_CHECK(false, text);
}

}  // namespace softmetal

namespace at::mps {

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
  if (!softmetal::on_queue(_serialQueue)) {
    violation("encoder outside the queue",
              "commandEncoder() was called outside a dispatch_sync block of the stream's queue");
  }
  if (_commandEncoder == nil) {
    @autoreleasepool {
      _commandEncoder = [[commandBuffer() computeCommandEncoder] retain];
    }
    ++softmetal::counts.encoders;
  }
  return _commandEncoder;
}

void MPSStream::endKernelCoalescing() {
  if (_commandEncoder == nil) return;
  SoftMetalCommandBuffer* root = softmetal::root_of(_commandBuffer);
  root->needsQueue = NO;  // the device itself ends this encoder
  [_commandEncoder endEncoding];
  root->needsQueue = YES;
  [_commandEncoder release];
  _commandEncoder = nil;
}

void MPSStream::commit() {
  softmetal::count_commit(commandBuffer());
#if SOFTMETAL_TORCH_2(15)
  addErrorHandler();
#endif
  [_commandBuffer commitAndContinue];
}

void MPSStream::commitAndWait() {
  if (_commandBuffer != nil) {
    softmetal::count_commit(_commandBuffer);
#if SOFTMETAL_TORCH_2(15)
    addErrorHandler();
#endif
    ++softmetal::counts.waits;
    [_commandBuffer commit];
    [_commandBuffer waitUntilCompleted];
    [_commandBuffer release];
    _commandBuffer = nil;
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

// Like PyTorch's function, synchronize() first ends and releases the encoder for every SyncType, even NONE. It may be
// called inside a block of the queue, for example by PyTorch's copy(), or outside, for example by
// torch.mps.synchronize().
void MPSStream::synchronize(SyncType syncType) {
  const auto lock = softmetal::lock_queues();
  endKernelCoalescing();
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
      std::unique_ptr<id<MTLBlitCommandEncoder>, void (*)(id<MTLBlitCommandEncoder>*)> ended(
          &encoder, [](id<MTLBlitCommandEncoder>* e) { [*e endEncoding]; });
      [encoder copyFromBuffer:source
                 sourceOffset:sourceOffset
                     toBuffer:destination
            destinationOffset:destinationOffset
                         size:length];
      ended.reset();
      synchronize(syncType);
    }
  });
}

void MPSStream::copy_and_sync(id<MTLBuffer> source, id<MTLBuffer> destination, size_t length, size_t sourceOffset,
                              size_t destinationOffset, bool non_blocking, uint64_t profileId) {
  copy(source, destination, length, sourceOffset, destinationOffset, profileId,
       non_blocking ? SyncType::COMMIT : SyncType::COMMIT_AND_WAIT);
}

void MPSStream::executeMPSGraph(MPSGraph*, NSDictionary*, NSDictionary*, SyncType) {
  TORCH_CHECK(false, "softmetal: executeMPSGraph: there is no MPSGraph; encode a Metal kernel instead");
}

void MPSStream::addCompletedHandler(MTLCommandBufferHandler block) {
  dispatch_sync(_serialQueue, ^{
    [commandBuffer() addCompletedHandler:block];
  });
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
  auto* messages = static_cast<c10::metal::ErrorMessages*>([_errorBuffer contents]);
  if (messages != nullptr && messages->count != 0) {
    messages->count = 0;
    const c10::metal::ErrorMessage& first = messages->msg[0];
    throw c10::AcceleratorError({first.func, first.file, first.line}, 1, first.message);
  }
#if SOFTMETAL_TORCH_2(15)
  std::optional<CommandBufferError> error;
  {
    const std::lock_guard lock(_commandBufferErrorMutex);
    error.swap(_commandBufferError);
  }
  if (!error) return;
  TORCH_CHECK_WITH(OutOfMemoryError, !error->is_oom, error->message);
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, error->code, error->message);
#endif
}

#if SOFTMETAL_TORCH_2(15)
// torch 2.13 and 2.14 lack this handler, so they do not report work that the GPU did not complete.
void MPSStream::addErrorHandler() {
  [commandBuffer() addCompletedHandler:^(id<MTLCommandBuffer> buffer) {
    if ([buffer status] != MTLCommandBufferStatusError) return;
    NSError* error = [buffer error];
    recordCommandBufferError({[error code] == MTLCommandBufferErrorOutOfMemory,
                              static_cast<int32_t>([error code]),
                              [[error localizedDescription] UTF8String]});
  }];
}

void MPSStream::recordCommandBufferError(CommandBufferError error) {
  const std::lock_guard lock(_commandBufferErrorMutex);
  if (!_commandBufferError) _commandBufferError = std::move(error);
}
#endif

MPSStream* MPSStreamImpl::_stream = nullptr;
MPSStream* MPSStreamImpl::getInstance() {
  static std::once_flag once;
  std::call_once(once, [] { _stream = new MPSStream(Stream(Stream::DEFAULT, Device(DeviceType::MPS, 0))); });
  return _stream;
}
MPSStream* getCurrentMPSStream() {
  return softmetal::current_stream != nullptr ? softmetal::current_stream : MPSStreamImpl::getInstance();
}
MPSStream* getDefaultMPSStream() {
  return MPSStreamImpl::getInstance();
}

#if SOFTMETAL_TORCH_2(14)
void setCurrentMPSStream(MPSStream* stream) {
  softmetal::current_stream = stream;
}
MPSStream* getStreamFromPool() {
  static std::atomic<int64_t> taken{0};
  return softmetal::stream_of_number(1 + taken++ % softmetal::kPoolStreams);
}
void synchronizeAllMPSStreams(SyncType type) {
  softmetal::for_each_stream([type](MPSStream& stream) { stream.synchronize(type); });
}
#endif
#if SOFTMETAL_TORCH_2(15)
MPSStream* getStreamByID(int64_t stream_id) {
  return softmetal::stream_of_number(stream_id);
}
#endif

// ---- device --------------------------------------------------------------------------------------------------------

MPSDevice* MPSDevice::_device = nullptr;
MPSDevice::MPSDevice() : _mtl_device(MTLCreateSystemDefaultDevice()) {}
MPSDevice::~MPSDevice() = default;
MPSDevice* MPSDevice::getInstance() {
  static std::once_flag once;
  std::call_once(once, [] { _device = new MPSDevice(); });
  return _device;
}
// Says yes only to the oldest macOS that PyTorch knows.
bool MPSDevice::isMacOS13Plus(MacOSVersion version) const {
  return version == MacOSVersion{};
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
#if SOFTMETAL_TORCH_2(14)
bool is_macos_at_least(MacOSVersion version) {
#else
bool is_macos_13_or_newer(MacOSVersion version) {
#endif
  return MPSDevice::getInstance()->isMacOS13Plus(version);
}
bool is_apple_family_or_newer(AppleGPUFamily family) {
  return family == AppleGPUFamily::APPLE_7_PLUS;
}

}  // namespace at::mps
