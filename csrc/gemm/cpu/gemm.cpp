// Runs products on threads. Divides each product into passes, allocates the memory of passes that run at the same time,
// and repeats a pass if its kernel cannot represent a value.
#include "csrc/gemm/cpu/gemm.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <vector>

#include "csrc/gemm/cpu/product.h"

namespace marlin::cpu {

namespace {

constexpr int64_t kRowsTogether = 512;  // the most rows of passes that run at the same time, to limit their memory
// A thread that packs fewer elements takes longer to start than to pack.
constexpr int64_t kPackGrain = int64_t{1} << 13;
constexpr int64_t kSliceGrain = int64_t{1} << 14;

// The tasks of several passes, with consecutive numbers: all tasks of the first pass, then those of the second, and so
// on.
class Tasks {
 public:
  Tasks(std::deque<Pass>& passes, int64_t (Pass::*count)() const) : passes_(passes) {
    ends_.reserve(passes.size());
    for (const Pass& pass : passes)
      ends_.push_back(this->count() + (pass.*count)());
  }

  int64_t count() const { return ends_.empty() ? 0 : ends_.back(); }

  // Calls run() with the pass to which task `index` belongs, and with the number of the task in this pass.
  template <class Run>
  void run(int64_t index, const Run& run) const {
    const auto found = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin());
    run(passes_[found], index - (found == 0 ? 0 : ends_[found - 1]));
  }

 private:
  std::deque<Pass>& passes_;
  std::vector<int64_t> ends_;
};

// Computes several passes at the same time. If representable() of a pass is false afterwards, the pass has no valid
// result.
void run_together(std::deque<Pass>& passes, const Parallel& parallel) {
  static thread_local Scratch value_scratch, sum_scratch, start_scratch, partial_scratch;
  const auto total = [&](int64_t (Pass::*size)() const) {
    return std::accumulate(passes.begin(), passes.end(), int64_t{0},
                           [&](int64_t sum, const Pass& pass) { return sum + (pass.*size)(); });
  };
  char* values = value_scratch.get<char>(total(&Pass::value_bytes));
  auto* sums = sum_scratch.get<float>(total(&Pass::sum_count));
  auto* starts = start_scratch.get<int64_t>(total(&Pass::start_count));
  auto* partial = partial_scratch.get<float>(total(&Pass::partial_count));
  for (Pass& pass : passes) {
    pass.place(values, sums, starts, partial);
    values += pass.value_bytes();
    sums += pass.sum_count();
    starts += pass.start_count();
    partial += pass.partial_count();
  }

  const Tasks packing(passes, &Pass::pack_tasks);
  const int64_t grain = std::max<int64_t>(1, kPackGrain / passes.front().pack_task_elements());
  parallel.run(packing.count(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      packing.run(i, [](Pass& pass, int64_t task) { pass.pack(task); });
  });

  // Thread t runs the tasks t, t + threads, t + 2 threads and so on. Contiguous shares could be unequal: a task takes
  // longer in a pass with more rows, and the tasks of a pass are adjacent in the list.
  const Tasks products(passes, &Pass::tasks);
  const int64_t threads = std::min<int64_t>(std::max(parallel.num_threads, 1), products.count());
  parallel.run(threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t i = thread; i < products.count(); i += threads) {
        products.run(i, [](Pass& pass, int64_t task) {
          if (pass.representable()) pass.multiply(task);
        });
      }
    }
  });

  const Tasks sliced(passes, &Pass::sliced_rows);
  if (sliced.count() != 0) {
    const int64_t N = passes.front().arguments().weight.N;
    parallel.run(sliced.count(), std::max<int64_t>(1, kSliceGrain / N), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        sliced.run(i, [](Pass& pass, int64_t m) { pass.add_slices(m); });
    });
  }
  value_scratch.trim(kKeepBytes);
  partial_scratch.trim(kKeepBytes);
}

// Repeats a pass after its kernel found a value that it cannot represent. Uses the fallback plans one after another.
void run_with_fallback(const Machine& machine, const CpuProblem& problem, const KernelSet& kernels, const Pass& failed,
                       const Parallel& parallel) {
  CpuPlan plan = failed.plan();
  bool done = false;
  while (!done) {
    plan = make_fallback_plan(machine, problem, plan);
    std::deque<Pass> alone;
    alone.emplace_back(failed.arguments(), plan, kernels, failed.pass());
    run_together(alone, parallel);
    done = alone.front().representable();
  }
}

// Returns the number of threads that share one product. Few threads should share a product, because a thread is faster
// if it reads whole rows of words. If all products have the same number of rows, returns the smallest number that gives
// every thread the same amount of work. Otherwise returns the number of all threads.
int threads_for_each(std::span<const GemmArguments> products, int threads) {
  const bool equal = std::all_of(products.begin(), products.end(),
                                 [&](const GemmArguments& product) { return product.M == products.front().M; });
  return equal ? threads / std::gcd(threads, static_cast<int>(products.size())) : threads;
}

}  // namespace

CpuProblem problem_of(const GemmArguments& arguments, Precision precision) {
  const PackedWeight& weight = arguments.weight;
  return {arguments.M,
          weight.N,
          weight.K,
          weight.format,
          weight.group_size,
          arguments.a_type,
          bf16_parts_of_codes(weight.format, weight.lut),
          precision,
          arguments.rounds};
}

void gemm_group_on(const Machine& machine, std::span<const GemmArguments> products, const Parallel& parallel,
                   Precision precision) {
  if (products.empty()) return;
  const KernelSet& kernels = *kernels_of(machine.isa);
  Machine share = machine;
  share.threads = threads_for_each(products, std::max(machine.threads, 1));
  std::deque<Pass> passes;
  const auto run = [&] {
    if (passes.empty()) return;
    run_together(passes, parallel);
    for (const Pass& pass : passes) {
      if (pass.representable()) continue;
      run_with_fallback(machine, problem_of(pass.arguments(), precision), kernels, pass, parallel);
    }
    passes.clear();
  };
  int64_t rows = 0;
  for (const GemmArguments& product : products) {
    if (product.M == 0 || product.weight.N == 0) continue;
    const CpuPlan plan = make_plan(share, problem_of(product, precision));
    for (int64_t pass = 0; pass < plan.passes; ++pass) {
      const int64_t more = part(product.M, plan.passes, pass).size();
      if (rows + more > kRowsTogether) {
        run();
        rows = 0;
      }
      rows += more;
      passes.emplace_back(product, plan, kernels, pass);
    }
  }
  run();
}

void gemm_on(const Machine& machine, const GemmArguments& arguments, const Parallel& parallel, Precision precision) {
  gemm_group_on(machine, {&arguments, 1}, parallel, precision);
}

}  // namespace marlin::cpu
