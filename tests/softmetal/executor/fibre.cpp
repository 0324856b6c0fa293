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

constexpr size_t kBlock = 64;         // fibres that are mapped at once
constexpr size_t kColours = 64;       // tops of stacks spread over the sets of the first-level cache
constexpr size_t kColourBytes = 576;
constexpr size_t kGuard = 4096;

}  // namespace

FibrePool::FibrePool(void (*main)(void*), void* argument, size_t stack_bytes)
    : main_(main), argument_(argument), stack_bytes_(stack_bytes) {}

FibrePool::~FibrePool() {
  for (char* block : blocks_) munmap(block, kBlock * stack_bytes_);
}

void FibrePool::grow() {
  void* memory = mmap(nullptr, kBlock * stack_bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::fprintf(stderr, "softmetal: no memory for fibre stacks\n");
    std::abort();
  }
  char* block = static_cast<char*>(memory);
  for (size_t i = 0; i < kBlock; ++i) mprotect(block + i * stack_bytes_, kGuard, PROT_NONE);
  blocks_.push_back(block);
  if (low_ == nullptr || block < low_) low_ = block;
  if (block + kBlock * stack_bytes_ > high_) high_ = block + kBlock * stack_bytes_;
}

void* FibrePool::start(size_t index) const {
  char* top = blocks_[index / kBlock] + (index % kBlock + 1) * stack_bytes_ - (index % kColours) * kColourBytes;
  auto* frame = reinterpret_cast<void**>(top) - 7;  // r15 r14 r13 r12 rbx rbp, return address: then aligned to 16
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
  if (started_ == blocks_.size() * kBlock) grow();
  return start(started_++);
}

void FibrePool::restart() {
  idle_.clear();
  started_ = 0;
}

bool FibrePool::contains(const void* address) const {
  const char* p = static_cast<const char*>(address);
  if (p < low_ || p >= high_) return false;
  for (const char* block : blocks_) {
    if (p >= block && p < block + kBlock * stack_bytes_) return true;
  }
  return false;
}

}  // namespace softmetal
