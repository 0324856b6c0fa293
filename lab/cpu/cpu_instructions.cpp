// Counts the instructions that a thread executes in single-step mode: after each instruction, the processor traps to a
// handler, which classifies the next one. cpu_instructions.py compiles this file. x86-64 Linux only.
#include <signal.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>

namespace {

// The kinds of product instructions, in the order of cpu_instructions.KINDS. If the vector length changes an
// instruction's rate, each length has its own kind. The last element of `counts` counts all instructions.
enum Kind { fma_256, fma_512, bytes_256, bytes_512, bf16_512, tile_bf16, tile_bytes, kinds };
uint64_t counts[kinds + 1];

// Product instructions have a VEX prefix (C4, which encodes the opcode map and L, the vector length) or an EVEX prefix
// (62). Sets the opcode of map 0F38, the mandatory prefix (1 is 66, 2 is F3) and the length (0 is 128 bits).
bool decode(const uint8_t* at, int& opcode, int& prefix, int& length) {
  if (at[0] == 0xC4 && (at[1] & 31) == 2) {
    opcode = at[3];
    prefix = at[2] & 3;
    length = at[2] >> 2 & 1;
    return true;
  }
  if (at[0] == 0x62 && (at[1] & 7) == 2) {
    opcode = at[4];
    prefix = at[2] & 3;
    length = at[3] >> 5 & 3;
    return true;
  }
  return false;
}

void count(int, siginfo_t*, void* context) {
  const auto at = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  ++counts[kinds];
  int opcode, prefix, length;
  if (!decode(reinterpret_cast<const uint8_t*>(at), opcode, prefix, length)) return;
  // In hexadecimal, the opcodes of packed vfmadd, vfmsub, vfnmadd and vfnmsub begin with 9, A or B, and end with 8, A,
  // C or E.
  const bool fma = opcode >= 0x98 && opcode < 0xC0 && (opcode & 15) >= 8 && opcode % 2 == 0 && prefix == 1;
  const bool bytes = (opcode == 0x04 || opcode == 0x50 || opcode == 0x51) && prefix == 1;  // vpmaddubsw, vpdpbusd(s)
  if (fma && length > 0) ++counts[length == 2 ? fma_512 : fma_256];
  if (bytes && length > 0) ++counts[length == 2 ? bytes_512 : bytes_256];
  if (opcode == 0x52 && prefix == 2 && length == 2) ++counts[bf16_512];
  if (opcode == 0x5C && prefix == 2) ++counts[tile_bf16];
  if (opcode == 0x5E) ++counts[tile_bytes];
}

}  // namespace

extern "C" {

void begin_steps() {
  for (uint64_t& value : counts)
    value = 0;
  struct sigaction action{};
  action.sa_sigaction = count;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &action, nullptr);
  asm volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");
}

const uint64_t* end_steps() {
  asm volatile("pushfq; andq $~0x100, (%%rsp); popfq" ::: "memory", "cc");
  return counts;
}
}
