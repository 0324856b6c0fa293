// Decodes integers to fp32 for any vector policy V (vec_*.h, which include this file after the ISA pragma). V::field
// returns `bits` bits of each word, from bit `shift` on.
#pragma once

namespace marlin::cpu {

template <class V, int bits>
struct IntegerCodes {
  typename V::F first;  // the value of code 0
  explicit IntegerCodes(const float* values) : first(V::set1(values[0])) {}
  template <int j>
  typename V::F decode(typename V::I words) const {
    return V::add(V::to_float(V::template field<bits * j, bits>(words)), first);
  }
};

}  // namespace marlin::cpu
