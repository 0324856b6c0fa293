// Command queues and command buffers. A command buffer records work, and executes the work when the host waits for it.
#include <Block.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <utility>

#include "metal.h"

NSErrorDomain const MTLCommandBufferErrorDomain = @"MTLCommandBufferErrorDomain";

using softmetal::violation;

namespace softmetal {
namespace {

double seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

Memory& memory_of(id<MTLBuffer> buffer) {
  return *static_cast<SoftMetalBuffer*>(buffer)->memory;
}

}  // namespace

Command::~Command() {
  for (id object : retained)
    [object release];
}

void Command::retain(id object) {
  retained.push_back([object retain]);
}

size_t encoded(const std::vector<std::unique_ptr<Command>>& commands) {
  return static_cast<size_t>(std::ranges::count_if(
      commands, [](const auto& command) { return command->kind != Command::Kind::deferred_write; }));
}

void Command::run() {
  if (kind == Kind::deferred_write) {
    if (deferred->write) std::exchange(deferred->write, nullptr)();
    return;
  }
  if (kind == Kind::copy) {
    Memory &from = memory_of(source), &to = memory_of(destination);
    std::memcpy(to.bytes() + destination_offset, from.bytes() + source_offset, size);
    if (to.initialised() != nullptr && from.initialised() != nullptr) {
      std::memcpy(to.initialised() + destination_offset, from.initialised() + source_offset, size);
    } else {
      to.mark_written(destination_offset, size);
    }
    return;
  }
  if (kind == Kind::fill) {
    std::memset(memory_of(destination).bytes() + destination_offset, value, size);
    memory_of(destination).mark_written(destination_offset, size);
    return;
  }
  const bool checked = sm_library_is_checked(dispatch.library) != 0;
  for (id object : retained) {
    if (![object isKindOfClass:[SoftMetalBuffer class]]) continue;
    Memory& memory = memory_of(object);
    for (sm_buffer& slot : dispatch.buffers) {
      if (slot.base == memory.bytes()) slot.initialised = memory.initialised();
    }
    for (sm_buffer& reached : resident) {
      if (reached.base == memory.bytes()) reached.initialised = memory.initialised();
    }
  }
  dispatch.resident = resident.data();
  dispatch.resident_count = static_cast<uint32_t>(resident.size());
  dispatch.seed = Device::get().next_seed();
  dispatch.perturb_seed = checked ? dispatch.seed + 1 : 0;
  sm_result* result = sm_launch(&dispatch);
  for (uint32_t i = 0; i < result->fault_count; ++i) {
    const sm_fault& fault = result->faults[i];
    const std::string text = (label.empty() ? "" : label + ": ") + fault.message;
    fault.kind < SM_FIRST_WARNING ? Device::get().add_fault(text) : Device::get().add_warning(text);
  }
  Device::get().add_record({dispatch.kernel->name, dispatch.seed, result});
  if (checked) return;
  // Fast mode does not observe stores, so all memory that the kernel can write is marked as written.
  const auto count_as_written = [this](const void* base) {
    for (id object : retained) {
      if (![object isKindOfClass:[SoftMetalBuffer class]]) continue;
      if (memory_of(object).bytes() == base) memory_of(object).mark_all_written();
    }
  };
  for (uint32_t i = 0; i < dispatch.kernel->argument_count; ++i) {
    const sm_argument& argument = dispatch.kernel->arguments[i];
    if (argument.kind != SM_ARGUMENT_BUFFER || argument.is_const) continue;
    count_as_written(dispatch.buffers[argument.index].base);
  }
  for (const sm_buffer& reached : resident) {
    if (reached.read_only == 0) count_as_written(reached.base);
  }
}

}  // namespace softmetal

@implementation SoftMetalQueue
- (id)init {
  committed = new std::deque<id<MTLCommandBuffer>>();
  return self;
}
- (void)dealloc {
  for (id<MTLCommandBuffer> buffer : *committed)
    [buffer release];
  delete committed;
  [super dealloc];
}
- (id<MTLCommandBuffer>)commandBuffer {
  SoftMetalCommandBuffer* buffer = [[SoftMetalCommandBuffer alloc] init];
  buffer->queue = [self retain];
  return [buffer autorelease];
}
@end

@implementation SoftMetalCommandBuffer
- (id)init {
  commands = new std::vector<std::unique_ptr<softmetal::Command>>();
  handlers = new std::vector<MTLCommandBufferHandler>();
  endedEncoders = new std::vector<id>();
  state = MTLCommandBufferStatusNotEnqueued;
  return self;
}
- (void)dealloc {
  delete commands;
  for (MTLCommandBufferHandler handler : *handlers)
    Block_release(handler);
  delete handlers;
  for (id encoder : *endedEncoders)
    [encoder release];
  delete endedEncoders;
  [failure release];
  [queue release];
  [super dealloc];
}
- (id<MTLCommandQueue>)commandQueue {
  return queue;
}
- (MTLCommandBufferStatus)status {
  return state;
}
- (NSError*)error {
  return failure;
}
- (double)GPUStartTime {
  return start;
}
- (double)GPUEndTime {
  return end;
}
- (void)requireOpen:(const char*)what {
  if (state != MTLCommandBufferStatusNotEnqueued) violation("committed command buffer", what, " after commit");
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  [self requireOpen:"addCompletedHandler"];
  if (openEncoder != nil) violation("handler beside an open encoder", "addCompletedHandler with an encoder open");
  handlers->push_back(Block_copy(block));
}
- (void)requireNoEncoder:(const char*)what {
  [self requireOpen:what];
  if (openEncoder != nil) {
    violation("one open encoder", what, ": a command encoder is already encoding to this command buffer");
  }
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  [self requireNoEncoder:"computeCommandEncoder"];
  return [[[SoftMetalComputeEncoder alloc] initWithCommandBuffer:self] autorelease];
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  [self requireNoEncoder:"blitCommandEncoder"];
  return [[[SoftMetalBlitEncoder alloc] initWithCommandBuffer:self] autorelease];
}
- (void)commit {
  [self requireOpen:"commit"];
  if (openEncoder != nil) violation("commit with an open encoder", "commit: endEncoding has not been called");
  if (needsQueue && softmetal::on_queue()) {
    violation("commit inside the block", "commit of PyTorch's command buffer inside a dispatch_sync block: "
                                         "PyTorch commits its own buffer");
  }
  state = MTLCommandBufferStatusCommitted;
  queue->committed->push_back([self retain]);
}
- (void)run {
  start = softmetal::seconds();
  if (softmetal::encoded(*commands) != 0) failure = [softmetal::Device::get().take_command_buffer_failure() retain];
  if (failure == nil) {
    for (const auto& command : *commands)
      command->run();
  }
  commands->clear();
  end = softmetal::seconds();
  state = failure == nil ? MTLCommandBufferStatusCompleted : MTLCommandBufferStatusError;
  for (MTLCommandBufferHandler handler : *handlers)
    handler(self);
}
- (void)waitUntilCompleted {
  if (state == MTLCommandBufferStatusNotEnqueued) {
    violation("wait before commit", "waitUntilCompleted on a command buffer that was not committed");
  }
  while (state == MTLCommandBufferStatusCommitted) {
    SoftMetalCommandBuffer* next = static_cast<SoftMetalCommandBuffer*>(queue->committed->front());
    queue->committed->pop_front();
    [next run];
    [next release];
  }
}
@end
