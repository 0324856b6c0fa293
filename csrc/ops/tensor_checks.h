// Checks of tensor arguments that the GEMM and the mLSTM operators share.
#pragma once

#include <sstream>

#include "csrc/ops/argument_rules.h"

namespace marlin {

// Joins texts for an error message. Call join only after a check has failed: its string stream costs more than all
// checks of a call.
template <class... Part>
std::string text(const Part&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// The argument checks of one call of an operator. Each calls fail() if its argument is wrong.
struct Checker {
  const char* op;
  at::Device device;  // the first argument's device

  void on_device(std::string_view argument, const Tensor& tensor) const {
    if (tensor.device() != device) {
      fail(op, argument, text("a tensor on ", device, " like the first argument"),
           text(describe(tensor), " on ", tensor.device()));
    }
  }

  void contiguous(std::string_view argument, const Tensor& tensor) const {
    if (!tensor.is_contiguous_or_false()) {
      fail(op, argument, "a contiguous tensor", text(describe(tensor), " with strides ", tensor.sym_strides()));
    }
  }
};

}  // namespace marlin
