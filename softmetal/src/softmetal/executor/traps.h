// Turns signals inside a kernel into reports: refused memory accesses, and the watchdog's signal.
#pragma once

#include <csignal>
#include <ctime>
#include <memory>

namespace softmetal {

class Machine;

// The stack on which an OS thread runs signal handlers, because a fibre's own stack may have overflowed.
class SignalStack {
 public:
  SignalStack();
  void* data() const { return bytes_.get(); }
  static constexpr size_t kBytes = 64 * 1024;

 private:
  std::unique_ptr<char[]> bytes_;
};

// While an object of this class exists, a signal on a fibre of this machine ends the launch with a report. Any other
// signal is passed to the previously installed handler.
class TrapScope {
 public:
  TrapScope(Machine& machine, const SignalStack& stack);
  ~TrapScope();
  TrapScope(const TrapScope&) = delete;
  TrapScope& operator=(const TrapScope&) = delete;

 private:
  stack_t before_{};
  timer_t timer_{};
  bool has_timer_ = false;
};

}  // namespace softmetal
