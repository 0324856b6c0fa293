// A cache that makes each value once. Threads that ask for the same key wait for the thread that makes its value. No
// lock is held while a value is made, so threads with other keys do not wait.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace marlin::mps {

template <typename Key, typename Value>
class CompileOnce {
 public:
  // Returns the value that make() gave for the key, in this call or in an earlier call. If the value is not final, the
  // threads that already wait for it receive it, but the next call makes a new value. If make() throws, its caller gets
  // the exception, and one of the waiting threads calls its own make().
  template <typename Make>
  Value get(const Key& key, const Make& make) {
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto [entry, is_new] = values_.try_emplace(key);
      if (is_new) entry->second = std::make_shared<Slot>();
      const std::shared_ptr<Slot> slot = entry->second;
      if (is_new) return fill(key, *slot, make, lock);
      changed_.wait(lock, [&] { return slot->value.has_value() || slot->was_abandoned; });
      if (slot->value.has_value()) return *slot->value;
    }
  }

 private:
  struct Slot {
    std::optional<Value> value;
    bool was_abandoned = false;
  };

  template <typename Make>
  Value fill(const Key& key, Slot& slot, const Make& make, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    try {
      const Value value = make();
      lock.lock();
      slot.value = value;
      if (!value.is_final) values_.erase(key);
      changed_.notify_all();
      return value;
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      slot.was_abandoned = true;
      values_.erase(key);
      changed_.notify_all();
      throw;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::shared_ptr<Slot>> values_;
};

}  // namespace marlin::mps
