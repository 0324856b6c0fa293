// Functions that compiled kernels call in checked mode. clang's -fsanitize=thread adds some of the calls, and
// msl/llvm/alignment.py adds others. The functions call the checker. They replace the sanitizer's runtime library.
#include <cstring>

#include "checker/checker.h"

using softmetal::Checker;

namespace {

inline void see(const void* address, uint64_t bytes, bool is_write, Checker::Kind kind, const void* code) {
  if (Checker* checker = Checker::active()) checker->access(address, bytes, is_write, kind, code);
}

constexpr uint32_t kUnsetInteger = 0xBAD1DEA5;  // also in msl/llvm/uninitialised.py

inline void align(const void* address, uint32_t alignment, const void* code) {
  if ((reinterpret_cast<uintptr_t>(address) & (alignment - 1)) == 0) return;
  if (Checker* checker = Checker::active()) checker->misaligned(address, alignment, code);
}

}  // namespace

#define ACCESS(bytes)                                                         \
  void __tsan_read##bytes(void* p) {                                          \
    align(p, bytes, __builtin_return_address(0));                             \
    see(p, bytes, false, Checker::Kind::kPlain, __builtin_return_address(0)); \
  }                                                                           \
  void __tsan_write##bytes(void* p) {                                         \
    align(p, bytes, __builtin_return_address(0));                             \
    see(p, bytes, true, Checker::Kind::kPlain, __builtin_return_address(0));  \
  }                                                                           \
  void __tsan_unaligned_read##bytes(void* p) {                                \
    see(p, bytes, false, Checker::Kind::kPlain, __builtin_return_address(0)); \
  }                                                                           \
  void __tsan_unaligned_write##bytes(void* p) {                               \
    see(p, bytes, true, Checker::Kind::kPlain, __builtin_return_address(0));  \
  }

extern "C" {

void __tsan_init(void) {}

ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void* __tsan_memcpy(void* to, const void* from, uint64_t bytes) {
  see(from, bytes, false, Checker::Kind::kCopy, __builtin_return_address(0));
  see(to, bytes, true, Checker::Kind::kCopy, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}

void* __tsan_memmove(void* to, const void* from, uint64_t bytes) {
  see(from, bytes, false, Checker::Kind::kCopy, __builtin_return_address(0));
  see(to, bytes, true, Checker::Kind::kCopy, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}

void* __tsan_memset(void* to, int value, uint64_t bytes) {
  see(to, bytes, true, Checker::Kind::kCopy, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}

// Called before a store of floating-point numbers of `element` bits each or, if `element` is 0, of a 32-bit integer.
// `value` holds the `bits` bits to be stored. If they are the pattern of a variable that was never set, the store is a
// fault.
void sm_check_value(const void* address, uint64_t value, uint32_t element, uint32_t bits) {
  Checker* checker = Checker::active();
  if (checker == nullptr) return;
  bool unset = false;
  if (element == 0) {
    unset = static_cast<uint32_t>(value) == kUnsetInteger;
  } else {
    // A number that was never set has all bits set. The loop compares only its upper 16 bits, because a half or bfloat
    // that was converted to float has zeros in the lower 16.
    for (uint32_t high = element - 16; high < bits; high += element)
      unset = unset || ((value >> high) & 0xFFFF) == 0xFFFF;
  }
  if (unset) checker->unset_value(address, __builtin_return_address(0));
}

void sm_check_alignment(const void* address, uint32_t alignment) {
  align(address, alignment, __builtin_return_address(0));
}

}  // extern "C"
