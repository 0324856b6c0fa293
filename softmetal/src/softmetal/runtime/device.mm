// The device and its buffers.
#include <objc/runtime.h>

#include <unistd.h>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "metal.h"

namespace softmetal {
namespace {

// bytes with known values after every buffer; fast mode uses them to find stores past the buffer's end
constexpr size_t kCanaryBytes = 64;
constexpr uint8_t kCanary = 0xA5;
constexpr size_t kQuarantineBytes = 64u << 20;
constexpr size_t kQuarantineObjects = 4096;

std::atomic<size_t> live_bytes{0};

// Keeps freed memory poisoned for a while before the memory is used again.
class Quarantine {
 public:
  void add(uint8_t* bytes, size_t length) {
    const std::lock_guard lock(mutex_);
    blocks_.push_back({bytes, length});
    held_ += length;
    while (held_ > kQuarantineBytes || blocks_.size() > kQuarantineObjects) {
      held_ -= blocks_.front().length;
      std::free(blocks_.front().bytes);
      blocks_.pop_front();
    }
  }

 private:
  struct Block {
    uint8_t* bytes;
    size_t length;
  };
  std::mutex mutex_;
  std::deque<Block> blocks_;
  size_t held_ = 0;
};
Quarantine& quarantine() {
  static auto* instance = new Quarantine();
  return *instance;
}

bool environment_flag(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' && std::strcmp(text, "0") != 0;
}

}  // namespace

NSInteger apple_family() {
  const char* set = std::getenv("SOFTMETAL_FAMILY");
  if (set == nullptr || *set == 0) return MTLGPUFamilyApple7;
  const NSInteger family = 1000 + std::strtol(set, nullptr, 10);
  if (family < MTLGPUFamilyApple7 || family > MTLGPUFamilyApple10) {
    throw std::invalid_argument(std::string("SOFTMETAL_FAMILY: expected 7 to 10, got ") + set);
  }
  return family;
}

size_t allocated_bytes() {
  return live_bytes;
}

Memory::Memory(size_t length) : length_(length) {
  constexpr size_t kAlignment = 256;
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, length + kCanaryBytes) != 0) throw std::bad_alloc();
  bytes_ = static_cast<uint8_t*>(memory);
  std::memset(bytes_, kFreshPoison, length);
  std::memset(bytes_ + length, kCanary, kCanaryBytes);
  initialised_ = static_cast<uint8_t*>(std::calloc(length + 1, 1));
  if (initialised_ == nullptr) throw std::bad_alloc();
  live_bytes += length;
}

Memory::~Memory() {
  for (size_t i = 0; i < kCanaryBytes; ++i) {
    if (bytes_[length_ + i] == kCanary) continue;
    Device::get().add_fault("a store past the end of a buffer of " + std::to_string(length_) + " bytes, at byte " +
                            std::to_string(length_ + i) + " (seen when the buffer was freed)");
    break;
  }
  for (const std::weak_ptr<DeferredWrite>& expected : expected_) {
    if (const auto write = expected.lock()) write->write = nullptr;
  }
  live_bytes -= length_;
  std::memset(bytes_, kFreedPoison, length_);
  quarantine().add(bytes_, length_ + kCanaryBytes);
  std::free(initialised_);
}

void Memory::mark_written(size_t offset, size_t length) {
  if (initialised_ != nullptr && length != 0) std::memset(initialised_ + offset, 1, length);
}

void Memory::mark_all_written() {
  std::free(initialised_);
  initialised_ = nullptr;
}

void Memory::expect(const std::shared_ptr<DeferredWrite>& write) {
  std::erase_if(expected_, [](const auto& earlier) { return earlier.expired(); });
  expected_.push_back(write);
}

Device& Device::get() {
  static auto* device = new Device();
  return *device;
}

Device::Device()
    : checked(environment_flag("SOFTMETAL_CHECKED")), validates(environment_flag("MTL_DEBUG_LAYER")), seed_(0) {
  if (const char* text = std::getenv("SOFTMETAL_SEED")) seed_ = std::strtoull(text, nullptr, 0);
}

void Device::set_seed(uint64_t seed) {
  const std::lock_guard lock(mutex);
  seed_ = seed;
}

uint64_t Device::next_seed() {
  const std::lock_guard lock(mutex);
  return seed_++;
}

void Device::add_record(Record record) {
  constexpr size_t kKept = 256;
  const std::lock_guard lock(mutex);
  records.push_back(std::move(record));
  if (records.size() > kKept) {
    sm_free_result(records.front().result);
    records.pop_front();
  }
}

void Device::add_fault(std::string text) {
  const std::lock_guard lock(mutex);
  faults.push_back(std::move(text));
}

void Device::add_warning(std::string text) {
  const std::lock_guard lock(mutex);
  warnings.push_back(std::move(text));
}

std::vector<std::string> Device::take_warnings() {
  const std::lock_guard lock(mutex);
  return std::exchange(warnings, {});
}

std::vector<std::string> Device::take_new_faults() {
  const std::lock_guard lock(mutex);
  raised_ = std::min(raised_, faults.size());
  std::vector<std::string> fresh(faults.begin() + static_cast<std::ptrdiff_t>(raised_), faults.end());
  raised_ = faults.size();
  return fresh;
}

void Device::fail_command_buffer(int64_t code, std::string message) {
  const std::lock_guard lock(mutex);
  failure_code_ = code;
  failure_message_ = std::move(message);
}

NSError* Device::take_command_buffer_failure() {
  const std::lock_guard lock(mutex);
  if (failure_message_.empty()) return nil;
  return make_error(MTLCommandBufferErrorDomain, failure_code_, std::exchange(failure_message_, {}));
}

NSError* make_error(NSErrorDomain domain, int64_t code, const std::string& message) {
  const std::array<id, 1> objects{[NSString stringWithUTF8String:message.c_str()]};
  const std::array<id<NSCopying>, 1> keys{NSLocalizedDescriptionKey};
  NSDictionary* info = [NSDictionary dictionaryWithObjects:objects.data() forKeys:keys.data() count:1];
  return [NSError errorWithDomain:domain code:static_cast<NSInteger>(code) userInfo:info];
}

void Device::clear() {
  const std::lock_guard lock(mutex);
  faults.clear();
  raised_ = 0;
  for (const Record& record : records)
    sm_free_result(record.result);
  records.clear();
}

}  // namespace softmetal

@implementation SoftMetalObject
- (void)dealloc {
  [ownLabel release];
  [super dealloc];
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (NSString*)label {
  return ownLabel;
}
- (void)setLabel:(NSString*)label {
  [label retain];
  [ownLabel release];
  ownLabel = label;
}
@end

// The class of a freed buffer. Any message to it is a use after free.
@interface SoftMetalFreedObject : NSObject
@end
@implementation SoftMetalFreedObject
- (id)retain {
  softmetal::violation("object lifetime", "a freed MTLBuffer was used: keep its tensor until the work is encoded");
}
- (NSUInteger)length {
  softmetal::violation("object lifetime", "a freed MTLBuffer was used: keep its tensor until the work is encoded");
}
- (void*)contents {
  softmetal::violation("object lifetime", "a freed MTLBuffer was used: keep its tensor until the work is encoded");
}
@end

// dealloc does not call [super dealloc], because the object of a freed buffer is kept for a while. Its class becomes
// SoftMetalFreedObject, which reports any use.
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wobjc-missing-super-calls"
@implementation SoftMetalBuffer
- (void)dealloc {
  static auto* graves = new std::deque<id>();
  static auto* mutex = new std::mutex();
  delete memory;
  memory = nullptr;
  [self setLabel:nil];
  object_setClass(self, [SoftMetalFreedObject class]);
  const std::lock_guard lock(*mutex);
  graves->push_back(self);
  if (graves->size() > softmetal::kQuarantineObjects) {
    softmetal::free_instance(graves->front());
    graves->pop_front();
  }
}
#pragma clang diagnostic pop
- (NSUInteger)length {
  return memory->length();
}
- (uint64_t)gpuAddress {
  return reinterpret_cast<uint64_t>(memory->bytes());
}
- (void*)contents {
  if (storage == MTLStorageModePrivate) return nullptr;  // only the GPU can reach private memory
  memory->mark_all_written();  // the device cannot observe the host's writes through the pointer
  return memory->bytes();
}
- (NSUInteger)allocatedSize {
  return memory->length();
}
- (MTLStorageMode)storageMode {
  return storage;
}
@end

id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
  static SoftMetalDevice* device = [[SoftMetalDevice alloc] init];
  return [device retain];
}

@implementation SoftMetalDevice
- (NSString*)name {
  return @"softmetal";
}
- (uint64_t)registryID {
  return 0x736d;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(SM_MAX_THREADS, SM_MAX_THREADS, SM_MAX_THREADS);
}
- (BOOL)hasUnifiedMemory {
  return YES;
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) / 4 * 3;
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return SM_MAX_THREADGROUP_BYTES;
}
- (NSUInteger)maxBufferLength {
  return static_cast<NSUInteger>([self recommendedMaxWorkingSetSize]);
}
- (NSUInteger)currentAllocatedSize {
  return softmetal::allocated_bytes();
}
- (BOOL)shouldMaximizeConcurrentCompilation {
  return softmetal::Device::get().compiles_concurrently;
}
- (void)setShouldMaximizeConcurrentCompilation:(BOOL)maximize {
  softmetal::Device::get().compiles_concurrently = maximize;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  const bool is_apple = family >= MTLGPUFamilyApple7 && family <= softmetal::apple_family();
  return is_apple || family == MTLGPUFamilyMac2 || family == MTLGPUFamilyCommon3 || family == MTLGPUFamilyMetal3;
}
- (id<MTLCommandQueue>)newCommandQueue {
  return [[SoftMetalQueue alloc] init];
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  if (length == 0) softmetal::violation("buffer length", "newBufferWithLength: expected at least 1 byte, got 0");
  if (length > [self maxBufferLength]) return nil;
  SoftMetalBuffer* buffer = [[SoftMetalBuffer alloc] init];
  buffer->memory = new softmetal::Memory(length);
  buffer->storage = (options & MTLResourceStorageModePrivate) != 0 ? MTLStorageModePrivate : MTLStorageModeShared;
  return buffer;
}
- (id<MTLBuffer>)newBufferWithBytes:(const void*)pointer length:(NSUInteger)length options:(MTLResourceOptions)options {
  id<MTLBuffer> buffer = [self newBufferWithLength:length options:options];
  if (buffer != nil && [buffer contents] == nullptr) {
    softmetal::violation("private buffer", "newBufferWithBytes: a private buffer has no contents for the host");
  }
  if (buffer != nil) std::memcpy([buffer contents], pointer, length);
  return buffer;
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
  extern id<MTLLibrary> softmetal_new_library(NSString*, MTLCompileOptions*, NSError**);
  return softmetal_new_library(source, options, error);
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError**)error {
  extern id<MTLComputePipelineState> softmetal_new_pipeline(id<MTLFunction>, NSError**);
  return softmetal_new_pipeline(function, error);
}
@end
