// The interface between the executor, our metal_stdlib (msl/include) and compiled Metal libraries, which are shared
// objects made by msl/compiler.py. The interface is plain C: the executor defines the sm_* functions, and compiled
// libraries import them.
#pragma once

#include <stdint.h>

#ifdef __clang__
// Marks functions at which the lanes of a simdgroup meet. The executor matches the lanes by their call site, so the
// compiler must not duplicate the calls.
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

// The GPU thread that runs on this OS thread. The values do not change during the life of a fibre.
typedef struct {
  sm_uint3 thread_position_in_grid;
  sm_uint3 thread_position_in_threadgroup;
  sm_uint3 threadgroup_position_in_grid;
  sm_uint3 threads_per_grid;
  sm_uint3 threads_per_threadgroup;  // smaller for threadgroups at a non-uniform edge
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

// Exchanges values between the lanes of a simdgroup. Each lane that takes part deposits `bytes` bytes, at most 64, and
// waits until all of them have reached the same call site. *slots then points to 32 deposits, one every `bytes` bytes;
// those of inactive lanes hold poison. The deposits are valid until the lane's next call into the executor. Returns the
// mask of active lanes.
//
// A call site is a return address. A function that calls sm_simd_exchange must therefore be always_inline, because
// otherwise all its uses would share one call site.
uint32_t sm_simd_exchange(const void* value, uint32_t bytes, const void** slots) SM_CONVERGENT;

// Called if a shuffle reads an inactive lane. Checked mode reports the read. In fast mode the read returns a fixed
// poison value.
void sm_report_inactive_lane(uint32_t lane);

// Computes d = a * b + c for 8x8 matrices spread over the simdgroup. Each lane holds two elements of each operand, in
// Apple's lane order: row 4*(lane>>4) + ((lane>>1)&3), columns 2p and 2p+1 with p = 2*((lane>>3)&1) + (lane&1).
// Types: 0 half, 1 bfloat, 2 float. Sums are fp32 in the order of k and are rounded once, to d's type. c may equal d.
//
// The call reads a, b and c, and may defer the write of d until sm_mma_sync. Call sm_mma_sync_if(d) before any other
// use of d: a read, a copy, an overwrite, or the end of d's life. That call is cheap if no write of d is deferred.
void sm_mma(void* d, uint32_t d_type, const void* a, uint32_t a_type, const void* b, uint32_t b_type, const void* c,
            uint32_t c_type) SM_CONVERGENT;
void sm_mma_sync(void) SM_CONVERGENT;
void sm_mma_sync_if(const void* d) SM_CONVERGENT;

// Returns the memory of a variable that a kernel declares (`threadgroup T x[N];`). All threads of a threadgroup get the
// same address. `site` numbers the declarations of one kernel from 0.
void* sm_threadgroup_variable(uint32_t site, uint32_t bytes, uint32_t align);

// Changes x, the result of an inexact function, by up to `ulps` units in the last place: the error that Metal allows
// for fp32. If the launch has no seed for such changes, returns x unchanged.
float sm_perturb(float x, float ulps);

enum { SM_ATOMIC_LOAD = 0, SM_ATOMIC_STORE = 1, SM_ATOMIC_UPDATE = 2 };

// Kernels call this function before each __atomic builtin (relaxed, on device or threadgroup memory), because the
// compiler does not instrument these builtins. The function counts and checks the operation, and lets other threads run
// before the operation. `operation` is SM_ATOMIC_*.
void sm_note_atomic(const volatile void* address, uint32_t bytes, int operation);

// Called in checked mode before a simdgroup loads or stores a matrix. Every lane must reach this call.
void sm_note_matrix_access(void) SM_CONVERGENT;

// Called if a kernel uses a function constant that has no value in this specialisation.
void sm_undefined_function_constant(const char* name);

// SM_ARGUMENT_ABSENT means that the argument has [[function_constant(x)]] and x is false. The kernel gets a null
// pointer.
enum { SM_ARGUMENT_BUFFER = 0, SM_ARGUMENT_THREADGROUP = 1, SM_ARGUMENT_ABSENT = 2 };

typedef struct {
  const char* name;
  uint32_t kind;          // SM_ARGUMENT_*
  uint32_t index;         // [[buffer(n)]] or [[threadgroup(n)]]
  uint32_t is_const;      // const device, or constant
  uint32_t is_reference;  // the kernel reads at most one element, of element_bytes bytes
  uint32_t element_bytes;
  uint32_t element_align;
} sm_argument;

typedef struct {
  void* const* buffers;      // 31 addresses (offset applied), NULL where unbound
  void* const* threadgroup;  // 31 addresses into this threadgroup's memory
} sm_bindings;

typedef struct {
  const char* name;  // the kernel's host name
  void (*entry)(const sm_bindings* bindings);
  const sm_argument* arguments;
  uint32_t argument_count;
  uint32_t max_total_threads;         // [[max_total_threads_per_threadgroup(n)]], 0: none
  uint32_t static_threadgroup_bytes;  // 0 in the library's file; sm_library_kernel sets the real number
} sm_kernel;

typedef struct {
  const char* name;
  const char* type;  // as written: "bool", "uint", "float2"
  uint32_t index;    // [[function_constant(n)]]
  uint32_t is_defined;
} sm_function_constant;

// One `threadgroup` variable. `code` is the address of the code that declares the variable. The executor finds the
// variable's kernel by this address.
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
