// Makes each value once, outside the lock: threads that ask for the same value wait for it, others go on.
#pragma once

#include <future>
#include <map>
#include <mutex>
#include <utility>

namespace marlin::mps {

template <typename Key, typename Value>
class CompileOnce {
 public:
  // Returns make()'s value for the key, from this call or an earlier one. A value that is not final is given to the
  // threads that wait for it and made anew by the next call; so is what make() throws.
  template <typename Make>
  Value get(const Key& key, const Make& make) {
    std::promise<Value> promise;
    std::shared_future<Value> future;
    bool is_mine = false;
    {
      const std::lock_guard lock(mutex_);
      const auto [entry, is_new] = values_.try_emplace(key);
      if (is_new) entry->second = promise.get_future().share();
      is_mine = is_new;
      future = entry->second;
    }
    if (is_mine) {
      try {
        const Value value = make();
        if (!value.is_final) forget(key);
        promise.set_value(value);
      } catch (...) {
        forget(key);
        promise.set_exception(std::current_exception());
      }
    }
    return future.get();
  }

 private:
  void forget(const Key& key) {
    const std::lock_guard lock(mutex_);
    values_.erase(key);
  }

  std::mutex mutex_;
  std::map<Key, std::shared_future<Value>> values_;
};

}  // namespace marlin::mps
