// The backward pass of the mLSTM, chunk by chunk, in ATen operators that run on every device (docs/use/mlstm.md,
// "Gradients"). It recomputes the weights inside the chunks. It stores one state and one gradient of a state per chunk.
#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "csrc/mlstm/backward.h"

namespace marlin {
namespace {

// The length of a chunk. Longer chunks need fewer steps for the gradient of the state, but larger [L, L] matrices. At
// this length, the matrices are still small compared with the gradient of the state.
constexpr int64_t kBackwardChunk = 64;
// Padding tokens have i = -kNeutralGate and f = kNeutralGate, so they leave the state unchanged.
constexpr double kNeutralGate = 1e30;

struct Sequence {
  Tensor q, k, v, i, f, h, grad_h;
};

// Reshapes [B, H, S, ...] to [B * H, chunks, L, ...] in the dtype of the states, and pads S with neutral tokens.
Tensor by_chunk(const Tensor& x, int64_t L, double neutral) {
  const int64_t S = x.size(2);
  const int64_t added = S == 0 ? L : (L - S % L) % L;
  Tensor wide = x.to(mlstm_state_dtype(x));
  if (added != 0) {
    wide = x.dim() == 3 ? at::constant_pad_nd(wide, {0, added}, neutral)
                        : at::constant_pad_nd(wide, {0, 0, 0, added}, neutral);
  }
  std::vector<int64_t> sizes{x.size(0) * x.size(1), (S + added) / L, L};
  if (x.dim() == 4) sizes.push_back(x.size(3));
  return wide.reshape(sizes);
}

Tensor column(const Tensor& x) {
  return x.unsqueeze(-1);
}

Tensor row_dot(const Tensor& a, const Tensor& b) {
  return (a * b).sum(-1);
}

// Intermediate values of the forward pass inside the chunks. All shapes below have two more leading dimensions, [X,
// chunks], where X = B * H.
struct Inside {
  Tensor scale_q;     // [L, DK]
  Tensor b;           // [L] decay since the start of the chunk
  Tensor m;           // [L]
  Tensor weight;      // [L, L] exp(D - m), zero above the diagonal
  Tensor score;       // [L, L]
  Tensor from_state;  // [L]
  Tensor den;         // [L]
  Tensor floor;       // [L]
};

Inside inside(const Sequence& x, const Tensor& n, const Tensor& m) {
  const int64_t L = x.q.size(2);
  Inside r;
  r.scale_q = x.q / std::sqrt(static_cast<double>(x.q.size(3)));
  r.b = at::log_sigmoid(x.f).cumsum(-1);
  const Tensor later = at::ones({L, L}, x.q.options().dtype(at::kBool)).triu(1);
  const Tensor D = ((column(r.b) - r.b.unsqueeze(-2)) + x.i.unsqueeze(-2))
                       .masked_fill(later, -std::numeric_limits<double>::infinity());
  const Tensor carried = r.b + column(m);
  r.m = at::maximum(D.amax(-1), carried);
  r.weight = (D - column(r.m)).exp();
  r.score = at::matmul(r.scale_q, x.k.transpose(-1, -2));
  r.from_state = (carried - r.m).exp();
  r.den = (r.score * r.weight).sum(-1) + r.from_state * at::matmul(r.scale_q, column(n)).squeeze(-1);
  r.floor = (-r.m).exp();
  return r;
}

// The derivative through the stabilisers m. h depends on m through eps. The final state depends on m because the state
// is scaled by exp(-m). The recurrence is m_t = max(decay_t + m_(t-1), i_t). If i_s is the larger term at a token s, m
// restarts from i_s. So m_t is i_s of the last such token s, plus the decays after s. If there is no such token, m_t is
// m0 plus all decays.
struct StabiliserGradient {
  Tensor i;      // [X, S]
  Tensor decay;  // [X, S]
  Tensor m0;     // [X]
};

StabiliserGradient stabiliser_gradient(const Tensor& grad_m, const Tensor& restarts) {
  const int64_t X = grad_m.size(0);
  const int64_t S = grad_m.size(1);
  const Tensor segment = restarts.to(at::kLong).cumsum(-1);
  const Tensor sums = at::zeros({X, S + 1}, grad_m.options()).scatter_add(1, segment, grad_m);
  const Tensor of_segment = sums.gather(1, segment);
  const Tensor before_segment = (sums.cumsum(-1) - sums).gather(1, segment);
  const Tensor before = grad_m.cumsum(-1) - grad_m;
  const Tensor none = at::zeros({}, grad_m.options());
  return {at::where(restarts, of_segment, none), at::where(restarts, none, of_segment - (before - before_segment)),
          sums.select(1, 0)};
}

}  // namespace

MlstmGradients mlstm_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0,
                              const Tensor& h, const Tensor& grad_h, const Tensor& grad_C, const Tensor& grad_n,
                              const Tensor& grad_m, int64_t chunk_size, double eps) {
  const int64_t B = q.size(0), H = q.size(1), S = q.size(2), DK = q.size(3), DV = v.size(3);
  const int64_t L = chunk_size == 0 ? kBackwardChunk : chunk_size;
  const Sequence x{by_chunk(q, L, 0),
                   by_chunk(k, L, 0),
                   by_chunk(v, L, 0),
                   by_chunk(i, L, -kNeutralGate),
                   by_chunk(f, L, kNeutralGate),
                   by_chunk(h, L, 0),
                   by_chunk(grad_h, L, 0)};
  const int64_t X = B * H, chunks = x.q.size(1), padded = chunks * L;

  auto sequence = [&](const Tensor& t) {
    return t.dim() == 3 ? t.reshape({B, H, padded}) : t.reshape({B, H, padded, t.size(3)});
  };
  auto [all_C, all_n, all_m] =
      mlstm_states_op().call(sequence(x.k), sequence(x.v), sequence(x.i), sequence(x.f), C0, n0, m0, L, 1);
  all_C = all_C.reshape({X, chunks + 1, DK, DV});
  all_n = all_n.reshape({X, chunks + 1, DK});
  all_m = all_m.reshape({X, chunks + 1});
  const Tensor C = all_C.narrow(1, 0, chunks), n = all_n.narrow(1, 0, chunks), m = all_m.narrow(1, 0, chunks);
  const Tensor next_m = all_m.narrow(1, 1, chunks);

  // Gradients of the outputs: numerator, denominator, stabiliser.
  const Inside in = inside(x, n, m);
  const Tensor inverse = (at::maximum(in.den.abs(), in.floor) + eps).reciprocal();
  const Tensor d_num = x.grad_h * column(inverse);
  const Tensor d_h = row_dot(x.grad_h, x.h) * inverse;
  const Tensor d_den = -(d_h * in.den.sign() * (in.den.abs() > in.floor));
  const Tensor d_m = (d_h * -eps).reshape({X, padded});

  // Gradients of the states, from the last chunk to the first.
  const Tensor decayed_q = in.scale_q * column(in.from_state);
  const Tensor whole = (in.b.select(-1, L - 1) + m - next_m).exp();
  const Tensor d_C = at::empty({X, chunks + 1, DK, DV}, all_C.options());
  const Tensor d_n = at::empty({X, chunks + 1, DK}, all_n.options());
  d_C.narrow(1, 0, chunks).copy_(at::matmul(decayed_q.transpose(-1, -2), d_num));
  d_n.narrow(1, 0, chunks).copy_(at::matmul(decayed_q.transpose(-1, -2), column(d_den)).squeeze(-1));
  d_C.select(1, chunks).copy_(grad_C.reshape({X, DK, DV}));
  d_n.select(1, chunks).copy_(grad_n.reshape({X, DK}));
  for (int64_t c = chunks - 1; c >= 0; --c) {
    const Tensor decay = column(whole.select(1, c));
    d_C.select(1, c).copy_(d_C.select(1, c) + d_C.select(1, c + 1) * column(decay));
    d_n.select(1, c).copy_(d_n.select(1, c) + d_n.select(1, c + 1) * decay);
  }
  const Tensor next_d_C = d_C.narrow(1, 1, chunks), next_d_n = d_n.narrow(1, 1, chunks);

  // Gradients of the inputs.
  const Tensor d_weighted = (at::matmul(d_num, x.v.transpose(-1, -2)) + column(d_den)) * in.weight;
  const Tensor d_from_state = at::matmul(d_num, C.transpose(-1, -2)) + column(d_den) * n.unsqueeze(-2);
  const Tensor to_state = ((in.b.narrow(-1, L - 1, 1) - in.b) + x.i - column(next_m)).exp();
  const Tensor d_to_state = at::matmul(x.v, next_d_C.transpose(-1, -2)) + next_d_n.unsqueeze(-2);
  const Tensor d_q =
      (at::matmul(d_weighted, x.k) + column(in.from_state) * d_from_state) / std::sqrt(static_cast<double>(DK));
  const Tensor d_k = at::matmul(d_weighted.transpose(-1, -2), in.scale_q) + column(to_state) * d_to_state;
  const Tensor d_v =
      at::matmul((in.score * in.weight).transpose(-1, -2), d_num) + column(to_state) * at::matmul(x.k, next_d_C);

  // Gradients of the exponents. The gradient of a decay is the sum over all paths from an input to an output that cross
  // the decay's token. The code adds up these paths directly, because a difference of two large sums would lose
  // precision.
  const Tensor pairs = d_weighted * in.score;
  const Tensor token_to_state = to_state * row_dot(x.k, d_to_state);
  const Tensor state_to_token = row_dot(decayed_q, d_from_state);
  const Tensor state_to_state = whole * ((next_d_C * C).sum({-1, -2}) + row_dot(next_d_n, n));
  const Tensor ones = at::ones({L, L}, in.b.options());
  const Tensor ends_after = at::matmul(ones.triu(), pairs);  // [r, l]: sum over the pairs of key l with the queries
                                                             // from r on
  const Tensor d_decay = ends_after.tril(-1).sum(-1) + at::matmul(state_to_token, ones.tril()) +
                         at::matmul(token_to_state, ones.triu(1)) + column(state_to_state);

  const Tensor final_m = grad_m.reshape({X}) - (grad_C.reshape({X, DK, DV}) * all_C.select(1, chunks)).sum({-1, -2}) -
                         row_dot(grad_n.reshape({X, DK}), all_n.select(1, chunks));
  const StabiliserGradient stabiliser = stabiliser_gradient(d_m + at::constant_pad_nd(column(final_m), {padded - 1, 0}),
                                                            (in.m == x.i).reshape({X, padded}));

  auto tokens = [&](const Tensor& t) { return t.reshape({B, H, padded, t.size(-1)}).narrow(2, 0, S); };
  auto gate = [&](const Tensor& t) { return t.reshape({B, H, padded}).narrow(2, 0, S); };
  const Tensor d_i = (pairs.sum(-2) + token_to_state).reshape({X, padded}) + stabiliser.i;
  const Tensor d_f = (d_decay.reshape({X, padded}) + stabiliser.decay) * (-x.f).sigmoid().reshape({X, padded});
  const Tensor d_m0 = (d_C.select(1, 0) * all_C.select(1, 0)).sum({-1, -2}) +
                      row_dot(d_n.select(1, 0), all_n.select(1, 0)) + stabiliser.m0;
  auto finished = [](const Tensor& t, const Tensor& like) { return t.to(like.scalar_type()).contiguous(); };
  return {finished(tokens(d_q), q),
          finished(tokens(d_k), k),
          finished(tokens(d_v), v),
          finished(gate(d_i), i),
          finished(gate(d_f), f),
          d_C.select(1, 0).clone(at::MemoryFormat::Contiguous).reshape({B, H, DK, DV}),
          d_n.select(1, 0).clone(at::MemoryFormat::Contiguous).reshape({B, H, DK}),
          d_m0.reshape({B, H})};
}

}  // namespace marlin
