// The C++ behind the Metal objects: buffers with flags of written bytes, encoded commands and the queue.
#pragma once

#include <Metal/Metal.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../executor/executor.h"
#include "object.h"

namespace softmetal {

inline constexpr NSUInteger kSetBytesLimit = 4096;
inline constexpr NSUInteger kThreadgroupLengthMultiple = 16;
inline constexpr uint8_t kFreshPoison = 0xFF;  // a NaN as half, bfloat and float; -1 as an integer
inline constexpr uint8_t kFreedPoison = 0xFB;  // a NaN or a huge number as half and bfloat; differs from kFreshPoison

// The result of a PyTorch operator, which a command of the stream writes to memory. When the command has run or the
// memory has been freed, `write` is empty.
struct DeferredWrite {
  std::function<void()> write;
};

// Memory of one MTLBuffer. `initialised` holds a flag for each byte, nonzero if the byte was written. A null pointer
// means that all bytes were written.
class Memory {
 public:
  explicit Memory(size_t length);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint8_t* bytes() const { return bytes_; }
  size_t length() const { return length_; }
  uint8_t* initialised() const { return initialised_; }
  void mark_written(size_t offset, size_t length);
  void mark_all_written();
  // Registers a deferred write. If this memory is freed before the write's command runs, the write is canceled.
  void expect(const std::shared_ptr<DeferredWrite>& write);

 private:
  size_t length_;
  uint8_t* bytes_;
  uint8_t* initialised_;
  std::vector<std::weak_ptr<DeferredWrite>> expected_;
};

// Bytes of live MTLBuffers.
size_t allocated_bytes();
// Returns the GPU's family. The default is MTLGPUFamilyApple7 (M1), so that code does not come to depend on newer
// families. The environment variable SOFTMETAL_FAMILY=n selects Apple<n>. MTLGPUFamilyApple10 (M5) has tensor units.
NSInteger apple_family();

struct Binding {
  enum class Kind { none, absent, buffer, bytes } kind = Kind::none;
  id<MTLBuffer> buffer = nil;  // not retained here: each command retains the buffers that it uses
  NSUInteger offset = 0;
  std::vector<uint8_t> bytes;
  uint64_t era = 0;  // the era in which the binding was made (currentEra in encoder.mm)
};

// A buffer that the host passed to useResource. This struct does not retain the buffer, but the encoder and its
// commands do.
struct Resident {
  id<MTLBuffer> buffer = nil;
  bool is_read_only = false;
};

// Metal source, with macros and function constants.
struct Program {
  struct Constant {
    std::string name;  // if empty, `index` identifies the constant
    uint32_t index;
    std::string value;
    std::string type;  // as in MSL
  };
  std::string source;
  std::vector<std::string> defines;  // NAME=VALUE
  std::vector<Constant> constants;
  uint32_t math = SM_MATH_FAST;   // Metal's default
  bool fast_functions = true;     // Metal's default: exp is fast::exp
  uint32_t language_version = 0;  // the number in __METAL_VERSION__; 0: the default

  // Compiles and opens the library. Throws std::runtime_error with the compiler's messages. If the source has function
  // constants, only `kernel` is compiled. If `kernel` is "", no kernel is compiled, and the library has only names and
  // arguments.
  const sm_library* open(bool checked, const char* kernel) const;
};

// A specialized kernel. Its first use in each mode, fast or checked, compiles it for that mode.
class Kernel {
 public:
  Kernel(Program program, std::string name) : program_(std::move(program)), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  const sm_library* library(bool checked);
  const sm_kernel* kernel(bool checked);

 private:
  Program program_;
  std::string name_;
  std::array<const sm_library*, 2> libraries_{};
  std::mutex mutex_;
};

// One encoded command. The command retains all objects that it uses, as a Mac's command buffer does.
struct Command {
  enum class Kind { dispatch, copy, fill, deferred_write } kind;
  sm_dispatch dispatch{};
  std::shared_ptr<DeferredWrite> deferred;
  std::string label;
  std::vector<id> retained;
  std::vector<std::vector<uint8_t>> bytes;  // setBytes data
  std::vector<sm_buffer> resident;          // useResource
  id<MTLBuffer> source = nil, destination = nil;
  NSUInteger source_offset = 0, destination_offset = 0, size = 0;
  uint8_t value = 0;

  explicit Command(Kind k) : kind(k) {}
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;
  void retain(id object);
  void run();
};

// Returns the number of commands that host code encoded. The deferred writes of PyTorch's operators are not counted.
size_t encoded(const std::vector<std::unique_ptr<Command>>& commands);

// An error whose localizedDescription is the message.
NSError* make_error(NSErrorDomain domain, int64_t code, const std::string& message);

// Settings and results of the device, for Python.
struct Record {
  std::string kernel;
  uint64_t seed;
  sm_result* result;
};
class Device {
 public:
  static Device& get();

  std::atomic<bool> checked;
  std::atomic<bool> validates;  // enforces the rules that only Metal's validation layer (MTL_DEBUG_LAYER) enforces
  // the value that the host set; it does not affect the device's compiles
  std::atomic<bool> compiles_concurrently = false;
  // A hook of a test sees every compile and can make it fail (softmetal_compile_hook).
  std::atomic<void (*)(int, const char*, char*, size_t)> compile_hook = nullptr;
  // The number of mps allocations that succeed before one fails. If negative, none fails.
  std::atomic<int64_t> allocations_left = -1;
  void fail_command_buffer(int64_t code, std::string message);  // softmetal_fail_command_buffer in python_api.h
  NSError* take_command_buffer_failure();                       // nil: the command buffer runs
  // maximum threads per threadgroup of every pipeline; tests lower it
  std::atomic<uint32_t> thread_limit = SM_MAX_THREADS;
  void set_seed(uint64_t seed);
  uint64_t next_seed();
  void add_record(Record record);
  void add_fault(std::string text);
  void add_warning(std::string text);
  std::vector<std::string> take_warnings();
  std::vector<std::string> take_new_faults();  // faults that were not raised before
  void clear();                                // faults and records
  std::deque<Record> records;                  // records of the latest dispatches, oldest first
  std::vector<std::string> faults;             // all faults since the last clear()
  std::vector<std::string> warnings;           // not yet issued
  std::mutex mutex;

 private:
  Device();
  uint64_t seed_;
  size_t raised_ = 0;
  int64_t failure_code_ = 0;
  std::string failure_message_;
};

// Returns true while a block of dispatch_sync runs on this thread.
bool on_queue();
// Returns the number of the current or latest block. Bindings from an earlier block belong to another operator.
uint64_t queue_block();
// Returns the label of the operator that is being encoded, from MPSProfiler.
std::string& operator_label();

}  // namespace softmetal

@interface SoftMetalDevice : NSObject <MTLDevice>
@end

// The base class of the objects that a device makes.
@interface SoftMetalObject : NSObject {
  NSString* ownLabel;
}
- (id<MTLDevice>)device;
- (NSString*)label;
- (void)setLabel:(NSString*)label;
@end

@interface SoftMetalBuffer : SoftMetalObject <MTLBuffer> {
 @public
  softmetal::Memory* memory;
  MTLStorageMode storage;
}
@end

@interface SoftMetalPipeline : SoftMetalObject <MTLComputePipelineState> {
 @public
  softmetal::Kernel* kernel;
}
@end

@interface SoftMetalQueue : SoftMetalObject <MTLCommandQueue> {
 @public
  std::deque<id<MTLCommandBuffer>>* committed;
}
@end

@class SoftMetalComputeEncoder, SoftMetalBlitEncoder;

@interface SoftMetalCommandBuffer : SoftMetalObject <MTLCommandBuffer> {
 @public
  SoftMetalQueue* queue;
  std::vector<std::unique_ptr<softmetal::Command>>* commands;
  std::vector<MTLCommandBufferHandler>* handlers;
  id openEncoder;                  // not retained, because the open encoder retains this command buffer
  std::vector<id>* endedEncoders;  // retained, so that a message to an encoder that the host released is reported
  MTLCommandBufferStatus state;
  NSError* failure;
  BOOL needsQueue;  // this buffer belongs to PyTorch's stream: encode only on the stream's serial queue
  double start, end;
}
- (void)run;
- (void)requireOpen:(const char*)what;
@end

@interface SoftMetalEncoder : SoftMetalObject <MTLCommandEncoder> {
 @public
  SoftMetalCommandBuffer* commandBuffer;
  BOOL ended;
}
- (id)initWithCommandBuffer:(SoftMetalCommandBuffer*)buffer;
- (void)requireEncoding:(const char*)what;
@end

@interface SoftMetalComputeEncoder : SoftMetalEncoder <MTLComputeCommandEncoder> {
 @public
  softmetal::Binding* bindings;
  std::vector<softmetal::Resident>* residents;  // for all later dispatches of this encoder
  NSUInteger* threadgroupLengths;
  uint64_t* threadgroupEras;
  SoftMetalPipeline* pipeline;
  uint64_t era;
  BOOL dispatchedWithPipeline;
}
@end

@interface SoftMetalBlitEncoder : SoftMetalEncoder <MTLBlitCommandEncoder>
@end
