// The stacks of GPU threads, and the switch between them (x86-64 System V).
#pragma once

#include <cstddef>
#include <vector>

namespace softmetal {

static_assert(sizeof(void*) == 8, "the executor's switch is written for x86-64");

// Saves the callee-saved registers and the stack pointer to *save and continues at `to`.
extern "C" void sm_switch(void** save, void* to);

// Stacks for the fibres of one machine. Stacks can be taken and returned in any order.
class FibrePool {
 public:
  // A fibre runs one GPU thread on a stack of its own. When it starts, it calls main(argument), which never returns.
  FibrePool(void (*main)(void*), void* argument, size_t capacity);
  ~FibrePool();
  FibrePool(const FibrePool&) = delete;
  FibrePool& operator=(const FibrePool&) = delete;

  // Returns the stack pointer of an idle or new fibre, as the target of a switch.
  void* take();
  // Returns a finished fibre to the pool. The switch away from the fibre saves its state in *context.
  void put_back(void** context) { idle_.push_back(context); }
  // Resets all fibres: each starts again from main.
  void restart();
  // Returns the top of the stack that contains an address, or null.
  char* top_of(const void* address) const;
  // Returns whether the address is in a stack's guard page. An access there means that the stack has overflowed.
  bool is_guard(const void* address) const;
  bool contains(const void* address) const { return address >= stacks_ && address < stacks_ + capacity_ * kStackBytes; }

 private:
  static constexpr size_t kStackBytes = 128 * 1024;
  void* start(size_t index);

  void (*main_)(void*);
  void* argument_;
  char* stacks_;
  size_t capacity_;
  size_t guarded_ = 0;  // stacks that have a guard page
  size_t started_ = 0;
  std::vector<void**> idle_;
};

}  // namespace softmetal
