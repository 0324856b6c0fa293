// Loaded before the C library: fails one allocation of at least kSmallest bytes, the n-th after it was told to.
// Python's own objects are smaller, so what fails is the memory of tensors and of the kernels.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

static const size_t kSmallest = 2048;
static __thread int busy = 0;
static volatile long left = -1;   // allocations that succeed before one fails; negative: none fails
static volatile long failed = 0;  // whether one has failed

void fail_allocation(long n) {
  failed = 0;
  left = n;
}
long allocation_failed(void) {
  left = -1;
  return failed;
}

static int fails(size_t size) {
  if (size < kSmallest || left < 0 || busy) return 0;
  if (__sync_fetch_and_sub(&left, 1) != 0) return 0;
  failed = 1;
  return 1;
}

int posix_memalign(void** block, size_t alignment, size_t size) {
  static int (*real)(void**, size_t, size_t) = NULL;
  if (real == NULL) {
    busy = 1;
    real = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    busy = 0;
  }
  return fails(size) ? ENOMEM : real(block, alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  static void* (*real)(size_t, size_t) = NULL;
  if (real == NULL) {
    busy = 1;
    real = (void* (*)(size_t, size_t))dlsym(RTLD_NEXT, "aligned_alloc");
    busy = 0;
  }
  if (!fails(size)) return real(alignment, size);
  errno = ENOMEM;
  return NULL;
}

// The dynamic loader ends the process when it gets no memory for a new thread's variables.
static int from_loader(void* caller) {
  Dl_info found;
  return dladdr(caller, &found) != 0 && found.dli_fname != NULL && strstr(found.dli_fname, "ld-linux") != NULL;
}

extern void* __libc_malloc(size_t);
void* malloc(size_t size) {
  if (size < kSmallest || left < 0 || from_loader(__builtin_return_address(0)) || !fails(size))
    return __libc_malloc(size);
  errno = ENOMEM;
  return NULL;
}
