// A library that is loaded before the C library and makes the n-th allocation fail. It counts one of two kinds of
// allocations. The first kind are allocations of at least kSmallest bytes, that is, the memory of tensors and kernels.
// Python's own objects are smaller. The second kind are all C++ objects of the package's extension.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static const size_t kSmallest = 2048;
static __thread int busy = 0;
static volatile long left = -1;   // how many allocations succeed before one fails; if negative, none fails
static volatile long failed = 0;  // 1 after an allocation has failed
static volatile int only_extension = 0;

void fail_allocation(long n, int of_extension) {
  failed = 0;
  only_extension = of_extension;
  left = n;
}
long allocation_failed(void) {
  left = -1;
  return failed;
}

static int count_down(void) {
  if (__sync_fetch_and_sub(&left, 1) != 0) return 0;
  failed = 1;
  return 1;
}

static int fails(size_t size) {
  return !only_extension && size >= kSmallest && left >= 0 && !busy && count_down();
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

static int is_from(void* caller, const char* file) {
  Dl_info found;
  return dladdr(caller, &found) != 0 && found.dli_fname != NULL && strstr(found.dli_fname, file) != NULL;
}

extern void* __libc_malloc(size_t);
void* malloc(size_t size) {
  // Requests of the dynamic loader never fail, because it ends the process if it gets no memory for a new thread.
  if (size < kSmallest || left < 0 || is_from(__builtin_return_address(0), "ld-linux") || !fails(size))
    return __libc_malloc(size);
  errno = ENOMEM;
  return NULL;
}

// C++'s operator new for all libraries. Takes memory from malloc, because GNU's operator delete calls free.
static void* new_object(void* block, void* caller) {
  if (block != NULL && !(only_extension && left >= 0 && is_from(caller, "torch_marlin_metal/_C") && count_down()))
    return block;
  free(block);
  // torch loads libstdc++ locally, so dlsym finds its symbols only through a handle.
  void* library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
  ((void (*)(void))dlsym(library, "_ZSt17__throw_bad_allocv"))();
  return NULL;
}
void* _Znwm(size_t size) {
  return new_object(malloc(size == 0 ? 1 : size), __builtin_return_address(0));
}
void* _ZnwmSt11align_val_t(size_t size, size_t alignment) {
  return new_object(aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment),
                    __builtin_return_address(0));
}
