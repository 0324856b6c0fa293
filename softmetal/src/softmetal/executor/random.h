// The random numbers of schedules. The same seed always gives the same schedule.
#pragma once

#include <cstdint>

namespace softmetal {

// SplitMix64 (Steele, Lea, Flood 2014).
inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed = 0) : state_(seed) {}
  uint32_t next() { return static_cast<uint32_t>(mix(state_ += 0x9E3779B97F4A7C15u) >> 32); }
  // Returns a number below n, uniform to within 2^-32 n.
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((static_cast<uint64_t>(next()) * n) >> 32); }

 private:
  uint64_t state_;
};

// Returns the index of a random set bit. The mask must not be zero.
inline uint32_t random_bit(Random& random, uint32_t mask) {
  uint32_t n = random.below(static_cast<uint32_t>(__builtin_popcount(mask)));
  while (n--)
    mask &= mask - 1;
  return static_cast<uint32_t>(__builtin_ctz(mask));
}

}  // namespace softmetal
