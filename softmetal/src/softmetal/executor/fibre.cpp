#include "fibre.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

asm(R"(
    .text
    .globl sm_switch
    .hidden sm_switch
    .type sm_switch, @function
sm_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    retq
    .size sm_switch, .-sm_switch

    .type sm_fibre_start, @function
    .hidden sm_fibre_start
    .globl sm_fibre_start
sm_fibre_start:
    xorl %ebp, %ebp
    movq %r12, %rdi
    callq *%r13
    ud2
    .size sm_fibre_start, .-sm_fibre_start
)");

extern "C" void sm_fibre_start();

namespace softmetal {
namespace {

// Stacks start at different offsets, so that the tops of the stacks use different sets of the first-level cache.
constexpr size_t kColours = 64;
constexpr size_t kColourBytes = 576;
constexpr size_t kGuard = 4096;

}  // namespace

FibrePool::FibrePool(void (*main)(void*), void* argument, size_t capacity)
    : main_(main), argument_(argument), capacity_(capacity) {
  void* memory =
      mmap(nullptr, capacity * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::fprintf(stderr, "softmetal: no memory for fibre stacks\n");
    std::abort();
  }
  stacks_ = static_cast<char*>(memory);
}

FibrePool::~FibrePool() {
  munmap(stacks_, capacity_ * kStackBytes);
}

void* FibrePool::start(size_t index) {
  for (; guarded_ <= index; ++guarded_)
    mprotect(stacks_ + guarded_ * kStackBytes, kGuard, PROT_NONE);
  char* top = stacks_ + (index + 1) * kStackBytes - (index % kColours) * kColourBytes;
  // 7 words: r15 r14 r13 r12 rbx rbp and the return address, which is aligned to 16
  auto* frame = reinterpret_cast<void**>(top) - 7;
  frame[2] = reinterpret_cast<void*>(main_);
  frame[3] = argument_;
  frame[6] = reinterpret_cast<void*>(&sm_fibre_start);
  return frame;
}

void* FibrePool::take() {
  if (!idle_.empty()) {
    void* context = *idle_.back();
    idle_.pop_back();
    return context;
  }
  return start(started_++);
}

char* FibrePool::top_of(const void* address) const {
  if (!contains(address)) return nullptr;
  const auto index = static_cast<size_t>(static_cast<const char*>(address) - stacks_) / kStackBytes;
  return stacks_ + (index + 1) * kStackBytes;
}

bool FibrePool::is_guard(const void* address) const {
  return contains(address) &&
         static_cast<size_t>(top_of(address) - static_cast<const char*>(address)) > kStackBytes - kGuard;
}

void FibrePool::restart() {
  idle_.clear();
  started_ = 0;
}

}  // namespace softmetal
