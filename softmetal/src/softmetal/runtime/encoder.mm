// Encoders, which record commands and enforce Metal's rules.
#include <algorithm>
#include <cstring>

#include "metal.h"

using softmetal::Binding;
using softmetal::Command;
using softmetal::violation;

namespace {

void require_range(const char* rule, const char* what, NSUInteger offset, NSUInteger size, NSUInteger length) {
  if (offset > length || size > length - offset) {
    violation(rule, what, ": bytes ", offset, " to ", offset + size, " of a buffer of ", length, " bytes");
  }
}

NSUInteger product(MTLSize size) {
  return size.width * size.height * size.depth;
}

std::string text(MTLSize size) {
  return "(" + std::to_string(size.width) + ", " + std::to_string(size.height) + ", " + std::to_string(size.depth) +
         ")";
}

sm_uint3 narrow(MTLSize size) {
  return {static_cast<uint32_t>(size.width), static_cast<uint32_t>(size.height), static_cast<uint32_t>(size.depth)};
}

}  // namespace

@implementation SoftMetalEncoder
- (id)initWithCommandBuffer:(SoftMetalCommandBuffer*)buffer {
  commandBuffer = [buffer retain];
  buffer->openEncoder = self;
  return self;
}
- (void)dealloc {
  if (!ended) {
    commandBuffer->openEncoder = nil;
    [commandBuffer release];
    softmetal::Device::get().add_fault(
        "Metal API violation [encoder lifetime]: a command encoder was released without endEncoding");
  }
  [super dealloc];
}
- (void)requireEncoding:(const char*)what {
  if (ended) violation("encoding after endEncoding", what, " on an encoder whose endEncoding was called");
  if (commandBuffer->needsQueue && !softmetal::on_queue()) {
    violation("encoder outside the queue", what,
              ": PyTorch's encoder is used outside a dispatch_sync block of its queue");
  }
}
- (void)endEncoding {
  [self requireEncoding:"endEncoding"];
  ended = YES;
  commandBuffer->openEncoder = nil;
  commandBuffer->endedEncoders->push_back([self retain]);
  [commandBuffer release];
  commandBuffer = nil;
}
@end

@implementation SoftMetalComputeEncoder
- (id)initWithCommandBuffer:(SoftMetalCommandBuffer*)buffer {
  self = [super initWithCommandBuffer:buffer];
  bindings = new Binding[SM_BUFFER_SLOTS];
  residents = new std::vector<softmetal::Resident>();
  threadgroupLengths = new NSUInteger[SM_BUFFER_SLOTS]();
  threadgroupEras = new uint64_t[SM_BUFFER_SLOTS]();
  era = 1;
  return self;
}
- (void)dealloc {
  for (NSUInteger i = 0; i < SM_BUFFER_SLOTS; ++i)
    [bindings[i].buffer release];
  for (const softmetal::Resident& resident : *residents)
    [resident.buffer release];
  delete residents;
  delete[] bindings;
  delete[] threadgroupLengths;
  delete[] threadgroupEras;
  [pipeline release];
  [super dealloc];
}

// An era is the work of one operator with one pipeline. A new era starts with each block of the queue, and with each
// pipeline that is set after a dispatch. Bindings of an earlier era are stale: another operator made them, or they were
// made for another pipeline.
- (uint64_t)currentEra {
  return softmetal::queue_block() << 32 | era;
}
- (Binding&)slot:(NSUInteger)index what:(const char*)what {
  [self requireEncoding:what];
  if (index >= SM_BUFFER_SLOTS) {
    violation("31 buffer slots", what, ": index ", index, ", expected 0 to ", SM_BUFFER_SLOTS - 1);
  }
  Binding& binding = bindings[index];
  binding.era = [self currentEra];
  return binding;
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  [self requireEncoding:"setComputePipelineState"];
  if (state == nil) violation("pipeline", "setComputePipelineState: expected a pipeline, got nil");
  [state retain];
  [pipeline release];
  pipeline = static_cast<SoftMetalPipeline*>(state);
  if (dispatchedWithPipeline) ++era;
  dispatchedWithPipeline = NO;
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  Binding& binding = [self slot:index what:"setBytes"];
  if (length == 0 || length > softmetal::kSetBytesLimit) {
    violation("setBytes length", "setBytes at index ", index, ": ", length, " bytes, expected 1 to ",
              softmetal::kSetBytesLimit);
  }
  if (bytes == nullptr) violation("setBytes pointer", "setBytes at index ", index, ": the pointer is null");
  const auto* begin = static_cast<const uint8_t*>(bytes);
  binding.kind = Binding::Kind::bytes;
  binding.bytes.assign(begin, begin + length);
  binding.offset = 0;
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  Binding& binding = [self slot:index what:"setBuffer"];
  if (buffer != nil && offset >= [buffer length]) {
    violation("buffer offset", "setBuffer at index ", index, ": offset ", offset, " of a buffer of ", [buffer length],
              " bytes");
  }
  [buffer retain];
  [binding.buffer release];
  binding.kind = buffer == nil ? Binding::Kind::absent : Binding::Kind::buffer;
  binding.buffer = buffer;
  binding.offset = offset;
}
- (void)setBufferOffset:(NSUInteger)offset atIndex:(NSUInteger)index {
  Binding& binding = [self slot:index what:"setBufferOffset"];
  if (binding.kind != Binding::Kind::buffer) {
    violation("unbound argument", "setBufferOffset at index ", index, ": no buffer is bound there");
  }
  if (offset >= [binding.buffer length]) {
    violation("buffer offset", "setBufferOffset at index ", index, ": offset ", offset, " of a buffer of ",
              [binding.buffer length], " bytes");
  }
  binding.offset = offset;
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  [self requireEncoding:"setThreadgroupMemoryLength"];
  if (index >= SM_BUFFER_SLOTS) {
    violation("31 threadgroup slots", "setThreadgroupMemoryLength: index ", index, ", expected 0 to ",
              SM_BUFFER_SLOTS - 1);
  }
  if (length % softmetal::kThreadgroupLengthMultiple != 0) {
    violation("threadgroup memory length", "setThreadgroupMemoryLength at index ", index, ": ", length,
              " bytes, expected a multiple of ", softmetal::kThreadgroupLengthMultiple);
  }
  threadgroupLengths[index] = length;
  threadgroupEras[index] = [self currentEra];
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  [self requireEncoding:"memoryBarrierWithScope"];
  if ((scope & (MTLBarrierScopeBuffers | MTLBarrierScopeTextures)) == 0) {
    violation("barrier scope", "memoryBarrierWithScope: scope ", static_cast<NSUInteger>(scope), " names nothing");
  }
}

- (void)useResource:(id<MTLResource>)resource usage:(MTLResourceUsage)usage {
  [self requireEncoding:"useResource"];
  if (resource == nil) violation("resource", "useResource: expected a buffer, got nil");
  if ((usage & (MTLResourceUsageRead | MTLResourceUsageWrite)) == 0) {
    violation("resource", "useResource: expected MTLResourceUsageRead or MTLResourceUsageWrite, got usage ",
              static_cast<NSUInteger>(usage));
  }
  residents->push_back({static_cast<id<MTLBuffer>>([resource retain]), (usage & MTLResourceUsageWrite) == 0});
}
- (void)useResources:(const id<MTLResource>[])resources count:(NSUInteger)count usage:(MTLResourceUsage)usage {
  for (NSUInteger i = 0; i < count; ++i)
    [self useResource:resources[i] usage:usage];
}

- (void)bindBuffer:(const sm_argument&)argument of:(const char*)kernel into:(Command&)command {
  const auto where = [&] {
    return std::string("kernel '") + kernel + "', argument '" + argument.name + "' [[buffer(" +
           std::to_string(argument.index) + ")]]";
  };
  const Binding& binding = bindings[argument.index];
  if (binding.kind == Binding::Kind::none) violation("unbound argument", where(), " has nothing bound");
  if (binding.era != [self currentEra]) {
    violation("stale binding", where(),
              " was bound by an earlier operator or for an earlier pipeline, not for this one");
  }
  sm_buffer& slot = command.dispatch.buffers[argument.index];
  if (binding.kind == Binding::Kind::absent) {
    if (!softmetal::Device::get().validates) return;
    violation("missing buffer", "Compute Function(", kernel, "): missing Buffer binding at index ", argument.index,
              " for ", argument.name, "[0]");
  }
  if (binding.kind == Binding::Kind::bytes) {
    const std::vector<uint8_t>& copy = command.bytes.emplace_back(binding.bytes);
    slot.base = const_cast<uint8_t*>(copy.data());  // the slot is read_only, so the executor reports any store
    slot.length = copy.size();
    slot.read_only = 1;
  } else {
    const auto* buffer = static_cast<SoftMetalBuffer*>(binding.buffer);
    slot.base = buffer->memory->bytes();
    slot.length = buffer->memory->length();
    slot.offset = binding.offset;
    command.retain(binding.buffer);
    if (argument.element_align > 1 && binding.offset % argument.element_align != 0) {
      violation("buffer alignment", where(), ": offset ", binding.offset, ", expected a multiple of ",
                argument.element_align, ", the alignment of its type");
    }
  }
  if (argument.is_reference && slot.length - slot.offset < argument.element_bytes) {
    violation("argument size", where(), ": ", slot.length - slot.offset, " bytes bound, its type has ",
              argument.element_bytes);
  }
}

- (void)dispatchGrid:(MTLSize)grid group:(MTLSize)group what:(const char*)what {
  [self requireEncoding:what];
  if (pipeline == nil) violation("pipeline", what, ": no pipeline is set");
  if (product(grid) == 0 || product(group) == 0) {
    violation("zero-size dispatch", what, ": grid of ", text(grid), " threads in threadgroups of ", text(group));
  }
  if (std::max({grid.width, grid.height, grid.depth}) > UINT32_MAX) {
    violation("grid size", what, ": grid of ", text(grid), " threads: a position has 32 bits");
  }
  const bool checked = softmetal::Device::get().checked;
  const sm_kernel* kernel = pipeline->kernel->kernel(checked);
  const NSUInteger limit = [pipeline maxTotalThreadsPerThreadgroup];
  if (product(group) > limit) {
    violation("threads per threadgroup", what, ": ", text(group), " is ", product(group), " threads, kernel '",
              kernel->name, "' allows ", limit);
  }
  auto command = std::make_unique<Command>(Command::Kind::dispatch);
  command->bytes.reserve(SM_BUFFER_SLOTS);
  NSUInteger threadgroup_bytes = kernel->static_threadgroup_bytes;
  for (uint32_t i = 0; i < kernel->argument_count; ++i) {
    const sm_argument& argument = kernel->arguments[i];
    if (argument.kind == SM_ARGUMENT_BUFFER) {
      [self bindBuffer:argument of:kernel->name into:*command];
    } else if (argument.kind == SM_ARGUMENT_THREADGROUP) {
      const bool bound = threadgroupEras[argument.index] == [self currentEra];
      if (!bound || threadgroupLengths[argument.index] == 0) {
        violation("threadgroup memory binding", "kernel '", kernel->name, "', argument '", argument.name,
                  "' [[threadgroup(", argument.index,
                  ")]]: ", bound ? "its length is 0" : "no length was set for this pipeline");
      }
      command->dispatch.threadgroup_bytes[argument.index] = static_cast<uint32_t>(threadgroupLengths[argument.index]);
      threadgroup_bytes += threadgroupLengths[argument.index];
    }
  }
  if (threadgroup_bytes > SM_MAX_THREADGROUP_BYTES) {
    violation("threadgroup memory", "kernel '", kernel->name, "': ", threadgroup_bytes, " bytes (",
              kernel->static_threadgroup_bytes, " declared in the kernel), at most ", SM_MAX_THREADGROUP_BYTES);
  }
  for (const softmetal::Resident& resident : *residents) {
    sm_buffer& reached = command->resident.emplace_back();
    const auto& memory = *static_cast<SoftMetalBuffer*>(resident.buffer)->memory;
    reached.base = memory.bytes();
    reached.length = memory.length();
    reached.read_only = resident.is_read_only ? 1 : 0;
    command->retain(resident.buffer);
  }
  command->dispatch.library = pipeline->kernel->library(checked);
  command->dispatch.kernel = kernel;
  command->dispatch.threads_per_grid = narrow(grid);
  command->dispatch.threads_per_threadgroup = narrow(group);
  command->label = softmetal::operator_label();
  command->retain(pipeline);
  commandBuffer->commands->push_back(std::move(command));
  dispatchedWithPipeline = YES;
}
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)group {
  const MTLSize grid =
      MTLSizeMake(groups.width * group.width, groups.height * group.height, groups.depth * group.depth);
  [self dispatchGrid:grid group:group what:"dispatchThreadgroups"];
}
- (void)dispatchThreads:(MTLSize)threads threadsPerThreadgroup:(MTLSize)group {
  [self dispatchGrid:threads group:group what:"dispatchThreads"];
}
@end

@implementation SoftMetalBlitEncoder
- (void)copyFromBuffer:(id<MTLBuffer>)source
          sourceOffset:(NSUInteger)sourceOffset
              toBuffer:(id<MTLBuffer>)destination
     destinationOffset:(NSUInteger)destinationOffset
                  size:(NSUInteger)size {
  [self requireEncoding:"copyFromBuffer"];
  if (source == nil || destination == nil) violation("blit buffers", "copyFromBuffer: a buffer is nil");
  if (size == 0) violation("zero-size copy", "copyFromBuffer: size 0");
  require_range("blit range", "copyFromBuffer, source", sourceOffset, size, [source length]);
  require_range("blit range", "copyFromBuffer, destination", destinationOffset, size, [destination length]);
  const NSUInteger apart =
      sourceOffset > destinationOffset ? sourceOffset - destinationOffset : destinationOffset - sourceOffset;
  if (source == destination && apart < size)
    violation("blit overlap", "copyFromBuffer: source and destination overlap");
  auto command = std::make_unique<Command>(Command::Kind::copy);
  command->source = source;
  command->destination = destination;
  command->source_offset = sourceOffset;
  command->destination_offset = destinationOffset;
  command->size = size;
  command->retain(source);
  command->retain(destination);
  commandBuffer->commands->push_back(std::move(command));
}
- (void)fillBuffer:(id<MTLBuffer>)buffer range:(NSRange)range value:(uint8_t)value {
  [self requireEncoding:"fillBuffer"];
  if (buffer == nil) violation("blit buffers", "fillBuffer: the buffer is nil");
  if (range.length == 0) violation("zero-size fill", "fillBuffer: range of length 0");
  require_range("blit range", "fillBuffer", range.location, range.length, [buffer length]);
  auto command = std::make_unique<Command>(Command::Kind::fill);
  command->destination = buffer;
  command->destination_offset = range.location;
  command->size = range.length;
  command->value = value;
  command->retain(buffer);
  commandBuffer->commands->push_back(std::move(command));
}
@end
