// The C functions that `import softmetal` calls. The caller frees returned texts with softmetal_free. If a call
// succeeds, the returned error is null.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../executor/executor.h"

#define SOFTMETAL_EXPORT extern "C" __attribute__((visibility("default")))

SOFTMETAL_EXPORT void softmetal_free(void* memory);

SOFTMETAL_EXPORT size_t softmetal_autorelease_pools(void);  // number of this thread's pools that are not yet drained

SOFTMETAL_EXPORT void softmetal_set_checked(int checked);
SOFTMETAL_EXPORT int softmetal_is_checked(void);
SOFTMETAL_EXPORT int softmetal_set_validates(int validates);  // as MTL_DEBUG_LAYER does; returns the previous value
SOFTMETAL_EXPORT int softmetal_compiles_concurrently(void);   // the device's shouldMaximizeConcurrentCompilation
SOFTMETAL_EXPORT void softmetal_set_seed(uint64_t seed);
SOFTMETAL_EXPORT uint32_t
softmetal_set_thread_limit(uint32_t limit);  // threads per threadgroup; returns the previous limit
// The number of the stream to which this thread encodes: 0 is the default stream, 1 to 32 are PyTorch's pool.
SOFTMETAL_EXPORT int64_t softmetal_stream(void);
SOFTMETAL_EXPORT char* softmetal_set_stream(int64_t number);
// Writes the fields of softmetal::StreamCounts, in the order of their declaration.
SOFTMETAL_EXPORT void softmetal_stream_counts(uint64_t* counts);
SOFTMETAL_EXPORT char* softmetal_faults(void);  // one fault per line
SOFTMETAL_EXPORT void softmetal_clear(void);    // clears faults and records
// Called before each compile, on the thread that compiles. `text` is the library's source, or the name of the
// pipeline's function. If the hook writes a message of less than `capacity` bytes to `error`, the compile fails with
// that message.
typedef void (*softmetal_compile_hook)(int is_pipeline, const char* text, char* error, size_t capacity);
SOFTMETAL_EXPORT void softmetal_set_compile_hook(softmetal_compile_hook hook);  // null: none
// Makes one mps allocation fail, after `count` that succeed; a negative `count` cancels this. Returns what was left of
// the previous call's count: negative if its failure has happened.
SOFTMETAL_EXPORT int64_t softmetal_fail_allocation(int64_t count);
// Makes the next command buffer with commands end with an error of MTLCommandBufferErrorDomain instead of running. An
// empty message cancels this.
SOFTMETAL_EXPORT void softmetal_fail_command_buffer(int64_t code, const char* message);
SOFTMETAL_EXPORT size_t softmetal_record_count(void);
// Returns the i-th of the latest dispatches. The result is valid until the next dispatch.
SOFTMETAL_EXPORT const sm_result* softmetal_record(size_t i, const char** kernel, uint64_t* seed);

// torch.mps.compile_shader. The caller releases objects with softmetal_release.
SOFTMETAL_EXPORT void* softmetal_new_shader_library(const char* source, char** error);
SOFTMETAL_EXPORT char* softmetal_function_names(void* library);  // one a line
SOFTMETAL_EXPORT void* softmetal_new_pipeline_named(void* library, const char* name, char** error);
SOFTMETAL_EXPORT void softmetal_release(void* object);
// Writes the maximum threads per threadgroup, the threads per simdgroup, and the bytes of threadgroup memory that the
// kernel declares.
SOFTMETAL_EXPORT void softmetal_pipeline_limits(void* pipeline, uint64_t* limits);

typedef struct {
  void* handle;       // MTLBuffer
  uint64_t offset;    // bytes
  const void* bytes;  // instead of a buffer
  uint64_t length;
  void* const* resident;  // MTLBuffers whose addresses are in `bytes`
  uint64_t resident_count;
} softmetal_argument;
SOFTMETAL_EXPORT char* softmetal_dispatch(void* pipeline, const softmetal_argument* arguments, size_t count,
                                          const uint64_t* threads, const uint64_t* group);
SOFTMETAL_EXPORT uint64_t softmetal_gpu_address(void* buffer);
SOFTMETAL_EXPORT void* softmetal_contents(void* buffer);  // for the host to read and write
SOFTMETAL_EXPORT void* softmetal_error_buffer(void);      // the stream's buffer to which kernels report errors
