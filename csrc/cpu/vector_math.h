// Functions of fp32 vectors for any vector policy V (vec_*.h).
#pragma once

namespace marlin::cpu {

// Evaluates a polynomial. The arguments are the coefficients from the highest power to the lowest.
template <class V, class... Rest>
[[gnu::always_inline]] inline typename V::F polynomial(typename V::F x, float highest, Rest... rest) {
  typename V::F sum = V::set1(highest);
  ((sum = V::fma(sum, x, V::set1(rest))), ...);
  return sum;
}

// Returns exp(x) with a relative error of 2e-7 for x <= 88. Returns 0 below -87, which is close to the subnormal range
// of fp32, and NaN for NaN.
template <class V>
[[gnu::always_inline]] inline typename V::F exp_vector(typename V::F x) {
  using F = typename V::F;
  constexpr float kLowest = -87.F;
  constexpr float kRound = 0x1.8p23F;  // adding and then subtracting this number rounds to an integer
  const F bounded = V::max(V::set1(kLowest), x);
  const F n = V::sub(V::rounded(V::fma(bounded, V::set1(0x1.715476p0F), V::set1(kRound))), V::set1(kRound));
  // log 2 is the sum of two fp32 numbers, because a single fp32 number would lose low bits of the remainder.
  const F r = V::fnma(n, V::set1(-0x1.05c611p-29F), V::fnma(n, V::set1(0x1.62e430p-1F), bounded));
  const F sum = polynomial<V>(r, 1.F / 5040, 1.F / 720, 1.F / 120, 1.F / 24, 1.F / 6, 1.F / 2, 1.F, 1.F);
  return V::zero_below(x, kLowest, V::mul(sum, V::pow2(n)));
}

}  // namespace marlin::cpu
