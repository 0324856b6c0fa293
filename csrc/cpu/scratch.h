// Working memory that a thread keeps between calls: page faults would cost a call of some 100 us too much.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace marlin::cpu {

class Scratch {
 public:
  // Returns at least `count` elements, 64-byte aligned, contents undefined. They are valid until the next call.
  template <class T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > size_) {
      trim(0);  // if the allocation fails, no later call takes an empty block for one of the old size
      data_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
      size_ = bytes;
    }
    return reinterpret_cast<T*>(data_.get());
  }

  // Frees the memory if it is larger than a thread should keep.
  void trim(size_t bytes) {
    if (size_ > bytes) {
      data_.reset();
      size_ = 0;
    }
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

}  // namespace marlin::cpu
