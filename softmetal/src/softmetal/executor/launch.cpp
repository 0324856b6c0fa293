// sm_launch: validates a dispatch, runs its threadgroups on machines, and returns faults and counters.
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <thread>

#include "checker/checker.h"
#include "compile/library.h"
#include "machine.h"
#include "report.h"

namespace softmetal {
namespace {

constexpr uint64_t kThreadsWorthAnother = 2048;  // fast mode uses one more OS thread for each 2048 GPU threads

struct Result : sm_result {
  std::deque<std::string> texts;
  std::vector<sm_fault> list;
};

// OS threads that wait for launches. The thread that calls sm_launch also runs threadgroups.
class Workers {
 public:
  ~Workers() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      quit_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_)
      thread.join();
  }

  void run(uint32_t count, const std::function<void(Machine&)>& work) {
    while (machines_.size() < count) {
      machines_.push_back(std::make_unique<Machine>(false));
      if (machines_.size() > 1) threads_.emplace_back([this, i = machines_.size() - 1] { loop(i); });
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      count_ = count;
      busy_ = count - 1;
      ++round_;
    }
    if (count > 1) wake_.notify_all();
    work(*machines_[0]);
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void loop(size_t index) {
    uint64_t seen = 0;
    for (;;) {
      const std::function<void(Machine&)>* work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return quit_ || (round_ != seen && index < count_); });
        if (quit_) return;
        seen = round_;
        work = work_;
      }
      (*work)(*machines_[index]);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) idle_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::unique_ptr<Machine>> machines_;
  std::vector<std::thread> threads_;
  const std::function<void(Machine&)>* work_ = nullptr;
  size_t count_ = 0, busy_ = 0;
  uint64_t round_ = 0;
  bool quit_ = false;
};

uint32_t os_threads(const Launch& launch) {
  uint32_t count = launch.dispatch->os_threads;
  if (const char* set = std::getenv("SOFTMETAL_THREADS"); count == 0 && set != nullptr) {
    count = static_cast<uint32_t>(std::strtoul(set, nullptr, 10));
  }
  if (count == 0) count = std::max(1u, std::thread::hardware_concurrency());
  sm_uint3 size = launch.dispatch->threads_per_threadgroup;
  uint64_t threads = launch.group_count * size.x * size.y * size.z;
  uint64_t worth = 1 + threads / kThreadsWorthAnother;
  return static_cast<uint32_t>(std::min({static_cast<uint64_t>(count), worth, launch.group_count}));
}

bool validate(Launch& launch) {
  const sm_dispatch& d = *launch.dispatch;
  auto fail = [&](const std::string& text) {
    report_launch(launch, text);
    return false;
  };
  if (launch.kernel == nullptr) return fail("no such kernel");
  if (launch.kernel->entry == nullptr) return fail("the library was compiled for another kernel");
  const sm_uint3 size = d.threads_per_threadgroup;
  uint64_t threads = static_cast<uint64_t>(size.x) * size.y * size.z;
  uint32_t most = launch.kernel->max_total_threads != 0 ? launch.kernel->max_total_threads : SM_MAX_THREADS;
  if (threads == 0 || launch.group_count == 0) return fail("a grid or threadgroup of no threads");
  if (threads > most) {
    return fail("threadgroup of " + std::to_string(threads) + " threads, the kernel takes " + std::to_string(most));
  }
  uint64_t bytes = launch.kernel->static_threadgroup_bytes;
  for (uint32_t n : d.threadgroup_bytes)
    bytes += (n + 15u) & ~15u;
  if (bytes > SM_MAX_THREADGROUP_BYTES) {
    return fail(std::to_string(bytes) + " bytes of threadgroup memory, 32768 are there");
  }
  for (uint32_t i = 0; i < launch.kernel->argument_count; ++i) {
    const sm_argument& argument = launch.kernel->arguments[i];
    if (argument.kind != SM_ARGUMENT_BUFFER || !argument.is_reference) continue;
    const sm_buffer& buffer = d.buffers[argument.index];
    if (buffer.base == nullptr || buffer.offset + argument.element_bytes > buffer.length) {
      return fail(std::string("argument '") + argument.name + "' is a reference to " +
                  std::to_string(argument.element_bytes) + " bytes, and buffer " + std::to_string(argument.index) +
                  (buffer.base == nullptr ? " is not bound" : " is shorter"));
    }
  }
  return true;
}

void add(sm_counters& sum, const sm_counters& part) {
  sum.threads += part.threads;
  sum.threadgroups += part.threadgroups;
  sum.threadgroup_barriers += part.threadgroup_barriers;
  sum.simdgroup_barriers += part.simdgroup_barriers;
  sum.simd_operations += part.simd_operations;
  sum.mmas += part.mmas;
  sum.atomics += part.atomics;
}

void run_fast(Launch& launch) {
  static Workers workers;
  for (uint32_t i = 0; i < SM_BUFFER_SLOTS; ++i) {
    const sm_buffer& buffer = launch.dispatch->buffers[i];
    launch.buffers[i] = buffer.base != nullptr ? static_cast<char*>(buffer.base) + buffer.offset : nullptr;
  }
  workers.run(os_threads(launch), [&](Machine& machine) {
    machine.run(launch, 1);
    std::lock_guard<std::mutex> lock(launch.mutex);
    add(launch.counters, machine.counters);
  });
}

void run_checked(Launch& launch) {
  static Machine machine(true);
  Random random(mix(launch.dispatch->seed ^ 0x6F72646572));
  launch.order.resize(launch.group_count);
  for (uint32_t i = 0; i < launch.order.size(); ++i) {
    uint32_t j = random.below(i + 1);
    launch.order[i] = launch.order[j];
    launch.order[j] = i;
  }
  // Metal promises neither that threadgroups run at the same time nor that the lanes of a simdgroup take turns. The
  // seed therefore chooses the number of threadgroups that run at once, and whether lanes are preempted. If a kernel
  // relies on one of these, it fails for some seeds.
  const uint32_t concurrent = 1 + random.below(kMaxConcurrentGroups);
  launch.preempts = random.below(4) != 0;
  machine.prepare(kMaxConcurrentGroups);
  Checker checker(launch, machine, kMaxConcurrentGroups);
  launch.checker = &checker;
  machine.run(launch, concurrent);
  checker.write_back();
  add(launch.counters, machine.counters);
  checker.count(launch.counters);
}

double watchdog_seconds(const sm_dispatch& dispatch) {
  constexpr double kDefault = 120;
  double seconds = dispatch.watchdog;
  if (const char* set = std::getenv("SOFTMETAL_WATCHDOG"); seconds == 0 && set != nullptr && *set != 0) {
    return std::max(0.0, std::strtod(set, nullptr));
  }
  return seconds == 0 ? kDefault : std::max(0.0, seconds);
}

}  // namespace
}  // namespace softmetal

extern "C" {

sm_result* sm_launch(const sm_dispatch* dispatch) {
  using namespace softmetal;
  static std::mutex turn;
  std::lock_guard<std::mutex> lock(turn);
  Launch launch{};
  launch.dispatch = dispatch;
  launch.kernel = dispatch->kernel;
  launch.watchdog = watchdog_seconds(*dispatch);
  sm_uint3 grid = dispatch->threads_per_grid, size = dispatch->threads_per_threadgroup;
  auto ceil_div = [](uint32_t n, uint32_t d) { return d == 0 ? 0 : (n + d - 1) / d; };
  launch.groups = {ceil_div(grid.x, size.x), ceil_div(grid.y, size.y), ceil_div(grid.z, size.z)};
  launch.group_count = static_cast<uint64_t>(launch.groups.x) * launch.groups.y * launch.groups.z;
  if (validate(launch)) {
    launch.sites = &dispatch->library->sites[static_cast<size_t>(launch.kernel - dispatch->library->kernels.data())];
    dispatch->library->table->is_checked ? run_checked(launch) : run_fast(launch);
  }
  auto* result = new Result;
  result->texts = std::move(launch.texts);
  result->list = std::move(launch.faults);
  result->fault_count = static_cast<uint32_t>(result->list.size());
  result->faults = result->list.data();
  result->counters = launch.counters;
  return result;
}

void sm_struct_sizes(uint32_t sizes[6]) {
  sizes[0] = sizeof(sm_compile_request);
  sizes[1] = sizeof(sm_buffer);
  sizes[2] = sizeof(sm_dispatch);
  sizes[3] = sizeof(sm_fault);
  sizes[4] = sizeof(sm_counters);
  sizes[5] = sizeof(sm_result);
}

void sm_free_result(sm_result* result) {
  delete static_cast<softmetal::Result*>(result);
}

}  // extern "C"
