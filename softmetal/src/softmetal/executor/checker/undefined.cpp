// Functions that compiled kernels call if clang's undefined-behavior sanitizers find an integer division by zero, a bad
// shift count or a bad array index. clang emits the structures below (compiler-rt, ubsan_value.h, ubsan_handlers.h).
#include "report.h"

using softmetal::Fault;
using softmetal::Machine;

namespace {

struct Type {
  uint16_t kind;  // 0: integer
  uint16_t info;  // For an integer type: bit 0 is set if the type is signed, and the other bits hold log2 of its width.
  char name[1];   // with quotation marks
};
struct Location {
  const char* file;
  uint32_t line, column;
};
struct ShiftData {
  Location location;
  const Type *left, *right;
};
struct IndexData {
  Location location;
  const Type *array, *index;
};

// A value of at most 64 bits is passed in `value` itself, a longer value by its address.
std::string text(uintptr_t value, const Type& type) {
  const uint32_t bits = 1u << (type.info >> 1);
  if ((type.info & 1) == 0 || bits > 64) return std::to_string(value);
  const uint32_t unused = 64 - bits;
  return std::to_string(static_cast<int64_t>(value << unused) >> unused);
}

void report_here(uint32_t kind, bool is_fatal, const void* code, const std::string& what) {
  if (sm_self == nullptr) return;  // an initializer that runs while the library is loaded, and not a GPU thread
  softmetal::report(Machine::current(), Fault{kind, is_fatal, code, what});
}

}  // namespace

extern "C" {

void __ubsan_handle_divrem_overflow(const void*, uintptr_t, uintptr_t) {
  report_here(SM_WARNING_DIVISION, false, __builtin_return_address(0),
              "integer division by zero: its result is unspecified");
}

void __ubsan_handle_shift_out_of_bounds(const ShiftData* data, uintptr_t, uintptr_t count) {
  report_here(SM_WARNING_SHIFT, false, __builtin_return_address(0),
              std::string("shift of ") + data->left->name + " by " + text(count, *data->right) +
                  ": only the low bits of the count are used");
}

void __ubsan_handle_out_of_bounds(const IndexData* data, uintptr_t index) {
  report_here(SM_FAULT_OUT_OF_BOUNDS, true, __builtin_return_address(0),
              "out-of-bounds index " + text(index, *data->index) + " of an array " + data->array->name);
}

}  // extern "C"
