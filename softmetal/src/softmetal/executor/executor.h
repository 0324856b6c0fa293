// The functions for the device and the Python module: they compile Metal source, open the compiled library and launch
// its kernels. The interface is plain C, so that ctypes can call it. No function throws. The caller frees each returned
// text or result with sm_free_*.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SM_BUFFER_SLOTS = 31, SM_MAX_THREADS = 1024, SM_MAX_THREADGROUP_BYTES = 32768, SM_SIMD_WIDTH = 32 };

// ---- compile -------------------------------------------------------------------------------------------------------

// A function constant by name, or by index if name is NULL. value is C text: "true", "-3", "0x1.8p+1", "{1,2,3}".
typedef struct {
  const char* name;
  uint32_t index;
  const char* value;
} sm_constant_value;

enum { SM_MATH_SAFE = 0, SM_MATH_RELAXED = 1, SM_MATH_FAST = 2 };

typedef struct {
  const char* source;                // Metal Shading Language text
  const char* file_name;             // for errors and reports; NULL: "program_source.metal"
  const char* const* include_paths;  // for #include "..."
  uint32_t include_path_count;
  const sm_constant_value* constants;
  uint32_t constant_count;
  uint32_t checked;            // instruments the code for checked mode
  uint32_t math;               // SM_MATH_*
  uint32_t fast_functions;     // true: exp means fast::exp; false: precise::exp
  const char* const* defines;  // "NAME" or "NAME=VALUE"
  uint32_t define_count;
  const char* kernel;         // host name of the only kernel to compile; NULL: all; "": none, only names and arguments
  uint32_t language_version;  // the number in __METAL_VERSION__: 310 is MSL 3.1; 0 means 310
} sm_compile_request;

// Returns 0 and the path of the shared object, or 1 and the compiler's messages. A repeated request needs no compiler.
// SOFTMETAL_PYTHON names the interpreter that runs the compiler; the default is python3.
int sm_compile(const sm_compile_request* request, char** path_or_error);
void sm_free_text(char* text);

// ---- libraries -----------------------------------------------------------------------------------------------------

typedef struct sm_library sm_library;

// Returns NULL and a message on failure. A second call with the same path returns the library of the first call.
const sm_library* sm_library_open(const char* path, char** error);
uint32_t sm_library_is_checked(const sm_library* library);
uint32_t sm_library_kernel_count(const sm_library* library);
const sm_kernel* sm_library_kernel(const sm_library* library, uint32_t i);  // static_threadgroup_bytes is filled in
const sm_kernel* sm_library_find(const sm_library* library, const char* host_name);
uint32_t sm_library_constant_count(const sm_library* library);
const sm_function_constant* sm_library_constant(const sm_library* library, uint32_t i);

// ---- launch --------------------------------------------------------------------------------------------------------

typedef struct {
  void* base;          // NULL: slot not bound
  uint64_t length;     // bytes of the whole buffer, from base
  uint64_t offset;     // the kernel gets base + offset; memory before this address is out of bounds
  uint32_t read_only;  // every store is a fault, as with setBytes
  const char* label;   // for reports; may be NULL
  // a flag for each byte: nonzero if written; the launch updates it. NULL: all bytes are written.
  uint8_t* initialised;
} sm_buffer;

typedef struct {
  const sm_library* library;
  const sm_kernel* kernel;
  sm_uint3 threads_per_grid;  // threadgroups x threads per threadgroup, or less if the last threadgroups are smaller
  sm_uint3 threads_per_threadgroup;
  sm_buffer buffers[SM_BUFFER_SLOTS];
  uint32_t threadgroup_bytes[SM_BUFFER_SLOTS];
  uint64_t seed;          // seed of the interleaving in checked mode
  uint64_t perturb_seed;  // seed of sm_perturb; 0: no perturbation
  uint32_t os_threads;    // OS threads in fast mode; 0: SOFTMETAL_THREADS or the number of cores
  double watchdog;        // seconds of processor time; 0: SOFTMETAL_WATCHDOG or 120; negative: no limit
  // Buffers that the kernel reaches through addresses in other buffers. If a buffer is neither in a slot nor in this
  // list, checked mode reports every access to it.
  const sm_buffer* resident;
  uint32_t resident_count;
} sm_dispatch;

typedef enum {
  SM_FAULT_OUT_OF_BOUNDS = 1,
  SM_FAULT_MISALIGNED,
  SM_FAULT_UNINITIALISED,
  SM_FAULT_RACE,            // between threads of one threadgroup
  SM_FAULT_RACE_GROUPS,     // between threadgroups
  SM_FAULT_WRONG_FLAG,      // race: the barrier between the accesses lacks the mem_flags of the accessed memory
  SM_FAULT_WEAK_BARRIER,    // race between simdgroups: only a simdgroup_barrier separates the accesses
  SM_FAULT_BARRIER,         // some threads do not reach a barrier
  SM_FAULT_SIMD,            // some lanes do not reach a simdgroup operation
  SM_FAULT_INACTIVE_LANE,   // a read of a value from a lane that does not take part
  SM_FAULT_CONST_STORE,     // a store to const device or constant memory
  SM_FAULT_CONSTANT_VALUE,  // a function constant has no value
  SM_FAULT_RESOURCE,        // the launch itself is wrong: its threadgroup memory or its arguments
  SM_FAULT_SIGNAL,          // the processor stopped the kernel
  SM_FAULT_ENDLESS,         // the dispatch took longer than the watchdog allows
  // The kinds from here on are warnings. Metal allows these operations, but they are usually mistakes.
  SM_WARNING_DIVISION,  // an integer division by zero
  SM_WARNING_SHIFT,     // a shift by the width or more
  SM_WARNING_EQUAL      // a race in which the write stores the value that the memory already held
} sm_fault_kind;

enum { SM_FIRST_WARNING = SM_WARNING_DIVISION };

typedef struct {
  uint32_t kind;
  uint32_t is_fatal;    // the dispatch ended here
  const char* message;  // the full report in one line: the fields below and the seed
  const char* kernel;
  const char* file;  // file of the user's source
  uint32_t line;     // 0: unknown
  sm_uint3 thread;   // position in the threadgroup
  sm_uint3 threadgroup;
  uint32_t simdgroup;
  int32_t buffer;  // slot, or -1
  int64_t offset;  // where the access was, in bytes from the start of the buffer or of the threadgroup array
} sm_fault;

typedef struct {
  uint64_t threads, threadgroups;
  uint64_t threadgroup_barriers, simdgroup_barriers;  // counted once for each threadgroup or simdgroup
  uint64_t simd_operations;                           // exchanges, per simdgroup
  uint64_t mmas;                                      // 8x8x8 products, per simdgroup
  uint64_t atomics;                                   // per thread
  // The fields from here on have values in checked mode only (has_bytes). Accesses that the compiler removed are not
  // counted.
  uint64_t has_bytes;
  uint64_t device_bytes_read, device_bytes_written;
  uint64_t distinct_bytes_read, distinct_bytes_written;
  uint64_t threadgroup_bytes_read, threadgroup_bytes_written;
  uint64_t buffer_bytes_read[SM_BUFFER_SLOTS], buffer_bytes_written[SM_BUFFER_SLOTS];
  uint64_t buffer_distinct_read[SM_BUFFER_SLOTS], buffer_distinct_written[SM_BUFFER_SLOTS];
} sm_counters;

typedef struct {
  uint32_t fault_count;
  const sm_fault* faults;
  sm_counters counters;
} sm_result;

// Runs the whole dispatch, in checked mode if the library was compiled for checked mode. Several threads may call
// sm_launch; the launches then run one after the other.
sm_result* sm_launch(const sm_dispatch* dispatch);
void sm_free_result(sm_result* result);

// Writes the sizes of sm_compile_request, sm_buffer, sm_dispatch, sm_fault, sm_counters and sm_result. A caller with
// its own declarations of these structures compares the sizes.
void sm_struct_sizes(uint32_t sizes[6]);

#ifdef __cplusplus
}
#endif
