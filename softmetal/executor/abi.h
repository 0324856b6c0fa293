// The seam between a compiled Metal library (a shared object made by msl/compiler.py from MSL text), our metal_stdlib
// (msl/include) and the executor. Plain C; the executor defines the sm_* functions, compiled libraries import them.
#pragma once

#include <stdint.h>

#ifdef __clang__
// Calls that must not be duplicated into other control flow: the call site tells which lanes meet.
#define SM_CONVERGENT __attribute__((convergent))
#else
#define SM_CONVERGENT
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  uint32_t x, y, z;
} sm_uint3;

// The GPU thread that is running on this OS thread. Fixed for the life of the fibre.
typedef struct {
  sm_uint3 thread_position_in_grid;
  sm_uint3 thread_position_in_threadgroup;
  sm_uint3 threadgroup_position_in_grid;
  sm_uint3 threads_per_grid;
  sm_uint3 threads_per_threadgroup;  // of this threadgroup: smaller at a non-uniform edge
  sm_uint3 dispatch_threads_per_threadgroup;
  sm_uint3 threadgroups_per_grid;
  uint32_t thread_index_in_threadgroup;
  uint32_t thread_index_in_simdgroup;
  uint32_t simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup;
} sm_thread;

extern __thread const sm_thread* sm_self __attribute__((tls_model("initial-exec")));

// Flags as in metal::mem_flags: 0 none, 1 device, 2 threadgroup, 4 texture.
void sm_threadgroup_barrier(uint32_t mem_flags) SM_CONVERGENT;
void sm_simdgroup_barrier(uint32_t mem_flags) SM_CONVERGENT;

// Rendezvous of the lanes of one simdgroup that are at this call (same return address). Each lane deposits `bytes`
// bytes (at most 64); when all active lanes have arrived, *slots points at 32 deposits, `bytes` apart, valid until the
// lane's next call into the executor. Returns the mask of active lanes. Slots of inactive lanes are poisoned.
// Functions that call it must be always_inline, or one call site would stand for several.
uint32_t sm_simd_exchange(const void* value, uint32_t bytes, const void** slots) SM_CONVERGENT;

// Reading a lane that is inactive (from a shuffle): reported in checked mode, a fixed poison value otherwise.
void sm_report_inactive_lane(uint32_t lane);

// d = a * b + c for 8x8 matrices spread over the simdgroup: each lane holds two elements of each operand, in Apple's
// lane order: row = 4*(lane>>4) + ((lane>>1)&3), columns 2p and 2p+1 with p = 2*((lane>>3)&1) + (lane&1).
// types: 0 half, 1 bfloat, 2 float. Accumulated in fp32 in k order, rounded once to d's type. May be deferred until
// sm_mma_sync; c may equal d. a, b and c are read at the call, d is written at the latest by sm_mma_sync: before any
// other use of d (read, copy, overwrite, end of its life) call sm_mma_sync_if(d), which is cheap when d is not pending.
void sm_mma(void* d, uint32_t d_type, const void* a, uint32_t a_type, const void* b, uint32_t b_type, const void* c,
            uint32_t c_type) SM_CONVERGENT;
void sm_mma_sync(void) SM_CONVERGENT;
void sm_mma_sync_if(const void* d) SM_CONVERGENT;

// Threadgroup memory declared inside a kernel (`threadgroup T x[N];`): the same address for all threads of a group.
// `site` numbers the declarations of one kernel from 0.
void* sm_threadgroup_variable(uint32_t site, uint32_t bytes, uint32_t align);

// Seeded perturbation of inexact functions within Metal's promised ulps (fp32); 0 ulps returns x unchanged.
float sm_perturb(float x, float ulps);

// Atomics: relaxed, on device or threadgroup memory. Called before each __atomic builtin: it is what counts, checks and
// interleaves (the operation itself is then done by the builtin, unseen).
void sm_note_atomic(const volatile void* address, uint32_t bytes, int is_write);

// Before each load or store of a matrix by its simdgroup, in checked mode: every lane must get there.
void sm_note_matrix_access(void) SM_CONVERGENT;

// The value of a function constant was used that this specialisation does not have.
void sm_undefined_function_constant(const char* name);

// ABSENT: gated by [[function_constant(x)]] with x false; the kernel gets a null pointer.
enum { SM_ARGUMENT_BUFFER = 0, SM_ARGUMENT_THREADGROUP = 1, SM_ARGUMENT_ABSENT = 2 };

typedef struct {
  const char* name;
  uint32_t kind;          // SM_ARGUMENT_*
  uint32_t index;         // [[buffer(n)]] or [[threadgroup(n)]]
  uint32_t is_const;      // const device, or constant
  uint32_t is_reference;  // one element of element_bytes is read at most
  uint32_t element_bytes;
  uint32_t element_align;
} sm_argument;

typedef struct {
  void* const* buffers;      // 31 addresses (offset applied), NULL where unbound
  void* const* threadgroup;  // 31 addresses into this threadgroup's memory
} sm_bindings;

typedef struct {
  const char* name;  // host name
  void (*entry)(const sm_bindings* bindings);
  const sm_argument* arguments;
  uint32_t argument_count;
  uint32_t max_total_threads;         // [[max_total_threads_per_threadgroup(n)]], 0: none
  uint32_t static_threadgroup_bytes;  // 0 in the file; ask the executor (sm_library_kernel)
} sm_kernel;

typedef struct {
  const char* name;
  const char* type;  // as written: "bool", "uint", "float2"
  uint32_t index;    // [[function_constant(n)]]
  uint32_t is_defined;
} sm_function_constant;

// One `threadgroup` variable, found by the code that declares it.
typedef struct {
  const void* code;
  uint32_t site, bytes, align, unused;
} sm_threadgroup_site;

// Exported by every compiled library.
typedef struct {
  uint32_t is_checked;
  uint32_t kernel_count;
  const sm_kernel* kernels;
  uint32_t constant_count;
  const sm_function_constant* constants;
  const sm_threadgroup_site* sites_begin;
  const sm_threadgroup_site* sites_end;
} sm_library_table;
extern const sm_library_table sm_table;

#ifdef __cplusplus
}
#endif
