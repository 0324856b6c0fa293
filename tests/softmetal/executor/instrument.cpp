// What clang's -fsanitize=thread and -fsanitize=alignment call, answered by the checker. Nothing of the sanitizers' own
// run time is there.
#include <cstring>

#include "checker.h"

using softmetal::Checker;

namespace {

inline void see(const void* address, uint64_t bytes, bool is_write, Checker::Kind kind, const void* code) {
  if (Checker* checker = Checker::active()) checker->access(address, bytes, is_write, kind, code);
}

// Layout as in clang's code generation for type checks.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  uint8_t log_alignment;
  uint8_t check;
};

}  // namespace

#define ACCESS(bytes)                                                                                         \
  void __tsan_read##bytes(void* p) {                                                                          \
    see(p, bytes, false, Checker::Kind::kPlain, __builtin_return_address(0));                                 \
  }                                                                                                           \
  void __tsan_write##bytes(void* p) {                                                                         \
    see(p, bytes, true, Checker::Kind::kPlain, __builtin_return_address(0));                                  \
  }                                                                                                           \
  void __tsan_unaligned_read##bytes(void* p) {                                                                \
    see(p, bytes, false, Checker::Kind::kPlain, __builtin_return_address(0));                                 \
  }                                                                                                           \
  void __tsan_unaligned_write##bytes(void* p) {                                                               \
    see(p, bytes, true, Checker::Kind::kPlain, __builtin_return_address(0));                                  \
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

void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, void* address) {
  if (Checker* checker = Checker::active()) {
    checker->misaligned(address, data->type->name, 1u << data->log_alignment, __builtin_return_address(0));
  }
}

}  // extern "C"
