#include "traps.h"

#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>

#include "compile/library.h"
#include "machine.h"
#include "report.h"

namespace softmetal {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr long kAgainNanoseconds = 20'000'000;  // time between two signals of the watchdog

int watchdog_signal() {
  return SIGRTMAX - 3;
}

struct sigaction before[NSIG];
std::mutex handlers_mutex;
uint32_t scopes = 0;

struct Trap {
  int signal;
  const void* code;  // the instruction
  const void* address;
  bool overflow;       // true if the fibre's stack overflowed
  const void* caller;  // the caller's address, if `code` is a stub that jumps to another library
};
thread_local Machine* machine_here = nullptr;
thread_local Trap trap;

const char* name_of(int signal) {
  switch (signal) {
    case SIGSEGV:
      return "SIGSEGV";
    case SIGBUS:
      return "SIGBUS";
    case SIGFPE:
      return "SIGFPE";
    default:
      return "SIGILL";
  }
}

// After the signal handler has returned, the fibre continues here.
[[noreturn]] void report_trap() {
  Machine& machine = *machine_here;
  Fault fault{SM_FAULT_SIGNAL, true, static_cast<const char*>(trap.code) + 1, ""};
  if (trap.overflow) {
    fault.text = "the thread's stack overflowed: its private arrays are too large, or a function calls itself";
  } else if (trap.signal == SIGILL && machine.is_checked()) {
    fault.kind = SM_FAULT_OUT_OF_BOUNDS;
    fault.text = "out-of-bounds access of a private array";
  } else {
    char address[40] = "";
    if (trap.signal == SIGSEGV || trap.signal == SIGBUS) {
      std::snprintf(address, sizeof address, " at address %p", trap.address);
    }
    fault.text = std::string("the processor stopped the kernel with ") + name_of(trap.signal) + address;
    if (!machine.is_checked()) fault.text += " (run it in checked mode, which names the cause)";
  }
  report(Machine::current(), fault);
  __builtin_unreachable();
}

[[noreturn]] void report_end_of_time() {
  Lane& lane = Machine::current();
  const sm_library& library = *machine_here->launch().dispatch->library;
  const void* code = static_cast<const char*>(trap.code) + 1;
  if (source_line(library, code).line == 0) code = trap.caller;
  report_expired(machine_here->launch(), lane, code);
  machine_here->give_up();
}

void continue_at(ucontext_t* context, void (*function)(), char* stack) {
  auto top = (reinterpret_cast<uintptr_t>(stack) - 256) & ~static_cast<uintptr_t>(15);
  context->uc_mcontext.gregs[REG_RSP] =
      static_cast<greg_t>(top - 8);  // the stack pointer at a function's entry: 8 below a multiple of 16
  context->uc_mcontext.gregs[REG_RIP] = static_cast<greg_t>(reinterpret_cast<uintptr_t>(function));
}

bool is_on_fibre(const ucontext_t* context) {
  return machine_here != nullptr && sm_self != nullptr &&
         machine_here->fibres().contains(reinterpret_cast<void*>(context->uc_mcontext.gregs[REG_RSP]));
}

void on_fault(int signal, siginfo_t* info, void* data) {
  auto* context = static_cast<ucontext_t*>(data);
  if (!is_on_fibre(context)) {
    // The signal does not come from a kernel. The instruction runs again, and the previously installed handler gets the
    // signal.
    sigaction(signal, &before[signal], nullptr);
    return;
  }
  const FibrePool& fibres = machine_here->fibres();
  auto* stack = reinterpret_cast<char*>(context->uc_mcontext.gregs[REG_RSP]);
  trap = {signal, reinterpret_cast<void*>(context->uc_mcontext.gregs[REG_RIP]), info->si_addr,
          signal == SIGSEGV && fibres.is_guard(info->si_addr), nullptr};
  continue_at(context, &report_trap, trap.overflow ? fibres.top_of(info->si_addr) : stack);
}

// Called when the watchdog's time is over. If a kernel's own code is running, the handler leaves it at the current
// instruction. All other code checks `expired` when it is safe to stop.
void on_time(int, siginfo_t*, void* data) {
  auto* context = static_cast<ucontext_t*>(data);
  if (machine_here == nullptr) return;
  Launch& launch = machine_here->launch();
  launch.expired = true;
  const auto* code = reinterpret_cast<const char*>(context->uc_mcontext.gregs[REG_RIP]);
  const sm_library& library = *launch.dispatch->library;
  if (!is_on_fibre(context) || launch.stopped || code < library.low || code >= library.high) return;
  auto* stack = reinterpret_cast<char*>(context->uc_mcontext.gregs[REG_RSP]);
  trap = {0, code, nullptr, false, *reinterpret_cast<void**>(stack)};
  continue_at(context, &report_end_of_time, stack);
}

void install() {
  const std::lock_guard<std::mutex> lock(handlers_mutex);
  if (scopes++ != 0) return;
  struct sigaction action = {};
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  action.sa_sigaction = &on_fault;
  for (int signal : kSignals)
    sigaction(signal, &action, &before[signal]);
  action.sa_sigaction = &on_time;
  sigaction(watchdog_signal(), &action, &before[watchdog_signal()]);
}

void uninstall() {
  const std::lock_guard<std::mutex> lock(handlers_mutex);
  if (--scopes != 0) return;
  for (int signal : kSignals)
    sigaction(signal, &before[signal], nullptr);
  // The watchdog's handler is not removed, because without it a late signal would end the process.
}

}  // namespace

SignalStack::SignalStack() : bytes_(new char[kBytes]) {}

TrapScope::TrapScope(Machine& machine, const SignalStack& stack) {
  stack_t mine = {};
  mine.ss_sp = stack.data();
  mine.ss_size = SignalStack::kBytes;
  sigaltstack(&mine, &before_);
  machine_here = &machine;
  install();
  const double seconds = machine.launch().watchdog;
  if (seconds <= 0) return;
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = watchdog_signal();
  event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
  itimerspec time = {};
  time.it_value.tv_sec = static_cast<time_t>(seconds);
  time.it_value.tv_nsec = static_cast<long>((seconds - static_cast<double>(time.it_value.tv_sec)) * 1e9);
  time.it_interval.tv_nsec = kAgainNanoseconds;
  has_timer_ = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
  if (has_timer_) timer_settime(timer_, 0, &time, nullptr);
}

TrapScope::~TrapScope() {
  if (has_timer_) timer_delete(timer_);
  uninstall();
  machine_here = nullptr;
  sigaltstack(&before_, nullptr);
}

}  // namespace softmetal
