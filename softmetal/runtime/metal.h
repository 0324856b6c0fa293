// What stands behind the Metal objects: buffers with a record of written bytes, encoded commands, the queue.
#pragma once

#include <Metal/Metal.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../executor/executor.h"
#include "object.h"

namespace softmetal {

inline constexpr NSUInteger kSetBytesLimit = 4096;
inline constexpr NSUInteger kThreadgroupLengthMultiple = 16;
inline constexpr uint8_t kFreshPoison = 0xFF;  // NaN as half, bfloat and float, -1 as an integer
inline constexpr uint8_t kFreedPoison = 0xFB;  // half and bfloat: NaN or huge; differs from fresh memory

// Memory of one MTLBuffer. `initialised` holds a byte per byte, non-zero where something was written; null: all of it.
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

 private:
  size_t length_;
  uint8_t* bytes_;
  uint8_t* initialised_;
};

// Bytes of live MTLBuffers.
size_t allocated_bytes();

struct Binding {
  enum class Kind { none, absent, buffer, bytes } kind = Kind::none;
  id<MTLBuffer> buffer = nil;  // retained by the command, not by the table
  NSUInteger offset = 0;
  std::vector<uint8_t> bytes;
  uint64_t era = 0;  // when it was bound: see ComputeEncoder
};

// Metal source, or a metallib, with what specialises it.
struct Program {
  struct Constant {
    std::string name;  // or empty: by index
    uint32_t index;
    std::string value;
  };
  std::string source;
  std::string metallib;              // the path of one, which then takes the source's place
  std::vector<std::string> defines;  // NAME=VALUE
  std::vector<Constant> constants;

  // Compiles and opens; throws std::runtime_error with the compiler's messages. With function constants in the source
  // only `kernel` gets code ("": none, for names and arguments).
  const sm_library* open(bool checked, const char* kernel) const;
};

// A specialised kernel, compiled for fast and for checked mode when first asked for.
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

// One piece of encoded work. It holds references to all that it will touch, as a Mac's command buffer does.
struct Command {
  enum class Kind { dispatch, copy, fill } kind;
  sm_dispatch dispatch{};
  std::string label;
  std::vector<id> retained;
  std::vector<std::vector<uint8_t>> bytes;  // setBytes data
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

// Settings and results of the device, shared with Python.
struct Record {
  std::string kernel;
  uint64_t seed;
  sm_result* result;
};
class Device {
 public:
  static Device& get();

  std::atomic<bool> checked;
  std::atomic<uint32_t> thread_limit = SM_MAX_THREADS;  // of every pipeline: less where a kernel needs many registers
  void set_seed(uint64_t seed);
  uint64_t next_seed();
  void add_record(Record record);
  void add_fault(std::string text);
  std::vector<std::string> take_new_faults();  // those not yet raised
  void clear();                                // faults and records
  std::deque<Record> records;                  // of the latest dispatches, oldest first
  std::vector<std::string> faults;             // all since cleared
  std::mutex mutex;

 private:
  Device();
  uint64_t seed_;
  size_t raised_ = 0;
};

// The serial queue: true while a block of dispatch_sync runs on this thread.
bool on_queue();
// Number of the block that runs, or last ran: tells a binding of this operator from one of an earlier operator.
uint64_t queue_block();
// Label of the operator that encodes, from MPSProfiler.
std::string& operator_label();

}  // namespace softmetal

@interface SoftMetalDevice : NSObject <MTLDevice>
@end

@interface SoftMetalBuffer : NSObject <MTLBuffer> {
 @public
  softmetal::Memory* memory;
  NSString* bufferLabel;
}
@end

@interface SoftMetalPipeline : NSObject <MTLComputePipelineState> {
 @public
  softmetal::Kernel* kernel;
}
@end

@interface SoftMetalQueue : NSObject <MTLCommandQueue> {
 @public
  std::deque<id<MTLCommandBuffer>>* committed;
  NSString* queueLabel;
}
@end

@class SoftMetalComputeEncoder, SoftMetalBlitEncoder;

@interface SoftMetalCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  SoftMetalQueue* queue;
  std::vector<std::unique_ptr<softmetal::Command>>* commands;
  std::vector<MTLCommandBufferHandler>* handlers;
  id openEncoder;  // not retained: an encoder retains its command buffer
  MTLCommandBufferStatus state;
  NSError* failure;
  NSString* bufferLabel;
  BOOL needsQueue;  // belongs to PyTorch's stream: encoding happens on its serial queue
  double start, end;
}
- (void)run;
- (void)requireOpen:(const char*)what;
@end

@interface SoftMetalEncoder : NSObject <MTLCommandEncoder> {
 @public
  SoftMetalCommandBuffer* commandBuffer;
  NSString* encoderLabel;
  BOOL ended;
}
- (id)initWithCommandBuffer:(SoftMetalCommandBuffer*)buffer;
- (void)requireEncoding:(const char*)what;
@end

@interface SoftMetalComputeEncoder : SoftMetalEncoder <MTLComputeCommandEncoder> {
 @public
  softmetal::Binding* bindings;
  NSUInteger* threadgroupLengths;
  uint64_t* threadgroupEras;
  SoftMetalPipeline* pipeline;
  uint64_t era;
  BOOL dispatchedWithPipeline;
}
@end

@interface SoftMetalBlitEncoder : SoftMetalEncoder <MTLBlitCommandEncoder>
@end
