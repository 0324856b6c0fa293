#include "csrc/mps/gpu_failures.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/mps/pytorch_internals.h"
#include "csrc/planner/commit_policy.h"

namespace marlin::mps {

namespace {

constexpr size_t kMostNames = 8;  // limit of the names in one message: the kernels of a whole token would be too many
                                  // to read

// The kernels of one command buffer. The stream that encodes them appends their names. After the commit, only the
// completed handler reads the names.
struct Kernels {
  std::vector<std::string> names;
  bool has_others = false;
  std::atomic<bool> ended = false;

  void add(const std::string& name) {
    if (std::find(names.begin(), names.end(), name) != names.end()) return;
    if (names.size() < kMostNames) {
      names.push_back(name);
    } else {
      has_others = true;
    }
  }

  std::string text() const {
    std::string all;
    for (const std::string& name : names)
      all += (all.empty() ? "" : ", ") + name;
    return all + (has_others ? " and others" : "");
  }
};

// The command buffer that a stream is filling. The buffer is not retained, because a retained buffer could keep the
// memory of its operands in use. A later command buffer can get the same address, but only after the handler of this
// command buffer has set `ended`.
struct Watched {
  const void* buffer = nullptr;
  std::shared_ptr<Kernels> kernels = std::make_shared<Kernels>();
};

struct Failure {
  std::atomic<bool> is_set = false;  // true after a failure; operators read it without taking the lock
  std::mutex mutex;
  std::string first;
};

Failure& failure() {
  static auto* instance = new Failure;  // not freed: Metal's threads may call handlers while the process exits
  return *instance;
}

void completed(id<MTLCommandBuffer> buffer, const Kernels& kernels) {
  if ([buffer status] != MTLCommandBufferStatusError) return;
  NSError* error = [buffer error];
  const std::string text = "torch_marlin_metal: the GPU did not complete a command buffer with " + kernels.text() +
                           ", so results since then may be wrong: " +
                           (error == nil ? "no reason given" : [[error localizedDescription] UTF8String]);
  // Only a later operator raises this message as an error, and the program may call none. So the message is also
  // printed.
  std::fprintf(stderr, "%s\n", text.c_str());
  const std::lock_guard lock(failure().mutex);
  if (failure().first.empty()) failure().first = text;
  failure().is_set = true;
}

}  // namespace

void watch_kernel(const std::string& name) {
  static auto* streams = new std::array<Watched, kStreams>;
  Watched& watched = (*streams)[stream_number()];
  const void* buffer = static_cast<const void*>(command_buffer());
  if (buffer != watched.buffer || watched.kernels->ended) {
    watched = {buffer, std::make_shared<Kernels>()};
    const std::shared_ptr<Kernels> kernels = watched.kernels;
    add_completed_handler(^(id<MTLCommandBuffer> ended) {
      completed(ended, *kernels);
      kernels->ended = true;
    });
  }
  watched.kernels->add(name);
}

void raise_gpu_failure() {
  if (!failure().is_set) return;
  std::string text;
  {
    const std::lock_guard lock(failure().mutex);
    text = std::exchange(failure().first, {});
    failure().is_set = false;
  }
  TORCH_CHECK(text.empty(), text);
}

}  // namespace marlin::mps
