// The C functions behind `import softmetal`: settings, results, torch.mps.compile_shader.
#include <cstring>

#include <ATen/mps/MPSStream.h>
#include "metal.h"
#include "python_api.h"
#include "pytorch/torch_device.h"

using softmetal::Device;

namespace {

char* copy_text(const std::string& text) {
  return strdup(text.c_str());
}

// Runs `body`. Returns the text of an exception, or null.
template <typename Body>
char* guarded(const Body& body) {
  try {
    @autoreleasepool {
      body();
    }
    return nullptr;
  } catch (const c10::Error& error) {
    return copy_text(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return copy_text(error.what());
  }
}

// Returns the library that `make` returns, or null and the error.
template <typename Make>
void* library_from(char** error, const Make& make) {
  id<MTLLibrary> library = nil;
  *error = guarded([&] {
    NSError* failure = nil;
    library = make(at::mps::MPSDevice::getInstance()->device(), &failure);
    if (library == nil) throw std::runtime_error([[failure localizedDescription] UTF8String]);
  });
  return library;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines)
    text += (text.empty() ? "" : "\n") + line;
  return text;
}

}  // namespace

void softmetal_free(void* memory) {
  std::free(memory);
}

void softmetal_set_checked(int checked) {
  Device::get().checked = checked != 0;
}
int softmetal_is_checked(void) {
  return Device::get().checked;
}
int softmetal_compiles_concurrently(void) {
  return Device::get().compiles_concurrently;
}
int softmetal_set_validates(int validates) {
  return Device::get().validates.exchange(validates != 0);
}
void softmetal_set_seed(uint64_t seed) {
  Device::get().set_seed(seed);
}

uint32_t softmetal_set_thread_limit(uint32_t limit) {
  return Device::get().thread_limit.exchange(limit);
}

int64_t softmetal_stream(void) {
  return softmetal::current_stream_number();
}

char* softmetal_set_stream(int64_t number) {
  return guarded([&] { softmetal::set_current_stream(number); });
}

void softmetal_stream_counts(uint64_t* counts) {
  const softmetal::StreamCounts found = softmetal::stream_counts();
  static_assert(sizeof(found) == 6 * sizeof(uint64_t));
  std::memcpy(counts, &found, sizeof(found));
}

void softmetal_set_compile_hook(softmetal_compile_hook hook) {
  Device::get().compile_hook = hook;
}

int64_t softmetal_fail_allocation(int64_t count) {
  return Device::get().allocations_left.exchange(count);
}

void softmetal_fail_command_buffer(int64_t code, const char* message) {
  Device::get().fail_command_buffer(code, message);
}

char* softmetal_faults(void) {
  const std::lock_guard lock(Device::get().mutex);
  return copy_text(joined(Device::get().faults));
}

void softmetal_clear(void) {
  Device::get().clear();
}

size_t softmetal_record_count(void) {
  const std::lock_guard lock(Device::get().mutex);
  return Device::get().records.size();
}

const sm_result* softmetal_record(size_t i, const char** kernel, uint64_t* seed) {
  const std::lock_guard lock(Device::get().mutex);
  const softmetal::Record& record = Device::get().records.at(i);
  *kernel = record.kernel.c_str();
  *seed = record.seed;
  return record.result;
}

void* softmetal_new_shader_library(const char* source, char** error) {
  return library_from(error, [&](id<MTLDevice> device, NSError** failure) {
    // PyTorch's own options.
    MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
    [options setMathMode:MTLMathModeSafe];
    [options setMathFloatingPointFunctions:MTLMathFloatingPointFunctionsPrecise];
    return [device newLibraryWithSource:[NSString stringWithUTF8String:source] options:options error:failure];
  });
}

char* softmetal_function_names(void* library) {
  std::vector<std::string> names;
  NSArray* array = [static_cast<id<MTLLibrary>>(library) functionNames];
  for (NSUInteger i = 0; i < [array count]; ++i)
    names.emplace_back([[array objectAtIndex:i] UTF8String]);
  return copy_text(joined(names));
}

void* softmetal_new_pipeline_named(void* library, const char* name, char** error) {
  id<MTLComputePipelineState> pipeline = nil;
  *error = guarded([&] {
    id<MTLFunction> function =
        [static_cast<id<MTLLibrary>>(library) newFunctionWithName:[NSString stringWithUTF8String:name]];
    if (function == nil) throw std::runtime_error(std::string("Failed to create function state object for: ") + name);
    NSError* failure = nil;
    pipeline = [at::mps::MPSDevice::getInstance()->device() newComputePipelineStateWithFunction:function
                                                                                          error:&failure];
    [function release];
    if (pipeline == nil) throw std::runtime_error([[failure localizedDescription] UTF8String]);
  });
  return pipeline;
}

void softmetal_release(void* object) {
  [static_cast<id>(object) release];
}

void softmetal_pipeline_limits(void* pipeline, uint64_t* limits) {
  const auto state = static_cast<id<MTLComputePipelineState>>(pipeline);
  limits[0] = [state maxTotalThreadsPerThreadgroup];
  limits[1] = [state threadExecutionWidth];
  limits[2] = [state staticThreadgroupMemoryLength];
}

char* softmetal_dispatch(void* pipeline, const softmetal_argument* arguments, size_t count, const uint64_t* threads,
                         const uint64_t* group) {
  return guarded([&] {
    auto* stream = at::mps::getCurrentMPSStream();
    at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
      id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
      [encoder setComputePipelineState:static_cast<id<MTLComputePipelineState>>(pipeline)];
      for (size_t i = 0; i < count; ++i) {
        const softmetal_argument& argument = arguments[i];
        if (argument.bytes != nullptr) {
          [encoder setBytes:argument.bytes length:argument.length atIndex:i];
          for (uint64_t j = 0; j < argument.resident_count; ++j) {
            [encoder useResource:static_cast<id<MTLBuffer>>(argument.resident[j])
                           usage:static_cast<MTLResourceUsage>(MTLResourceUsageRead | MTLResourceUsageWrite)];
          }
        } else {
          [encoder setBuffer:static_cast<id<MTLBuffer>>(argument.handle) offset:argument.offset atIndex:i];
        }
      }
      [encoder dispatchThreads:MTLSizeMake(threads[0], threads[1], threads[2])
          threadsPerThreadgroup:MTLSizeMake(group[0], group[1], group[2])];
    });
  });
}

uint64_t softmetal_gpu_address(void* buffer) {
  return [static_cast<id<MTLBuffer>>(buffer) gpuAddress];
}

void* softmetal_error_buffer(void) {
  return at::mps::getCurrentMPSStream()->getErrorBuffer();
}

void* softmetal_contents(void* buffer) {
  return [static_cast<id<MTLBuffer>>(buffer) contents];
}
