// Stacks that GPU threads run on, and the switch between them (x86-64 System V).
#pragma once

#include <cstddef>
#include <vector>

namespace softmetal {

static_assert(sizeof(void*) == 8, "the executor's switch is written for x86-64");

// Saves the callee-saved registers and the stack pointer to *save, goes on at `to`.
extern "C" void sm_switch(void** save, void* to);

// Stacks for the fibres of one machine; taken and given back in any order.
class FibrePool {
 public:
  // A fibre that has not started calls main(argument), which never returns.
  FibrePool(void (*main)(void*), void* argument, size_t capacity);
  ~FibrePool();
  FibrePool(const FibrePool&) = delete;
  FibrePool& operator=(const FibrePool&) = delete;

  // A stack pointer to switch to: of an idle fibre, or of a new one.
  void* take();
  // A fibre whose work is done; *context will be saved by the switch that leaves it.
  void put_back(void** context) { idle_.push_back(context); }
  // Forgets what all fibres were doing: they start again from main.
  void restart();
  bool contains(const void* address) const { return address >= stacks_ && address < stacks_ + capacity_ * kStackBytes; }

 private:
  static constexpr size_t kStackBytes = 128 * 1024;
  void* start(size_t index);

  void (*main_)(void*);
  void* argument_;
  char* stacks_;
  size_t capacity_;
  size_t guarded_ = 0;  // stacks that have their guard page
  size_t started_ = 0;
  std::vector<void**> idle_;
};

}  // namespace softmetal
