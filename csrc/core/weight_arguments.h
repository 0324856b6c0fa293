// A packed weight as one argument of an operator. This file alone knows which fields a weight has and where they stand
// in a schema.
//
// An implementation takes the weight as one argument, and weight_schema takes it as `Weight weight`:
//   Tensor moe_gemm(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids, bool reduce);
//   moe_gemm(Tensor a, Weight weight, Tensor expert_ids, *, bool reduce=False) -> Tensor
// The dispatcher has the fields one by one: the positional fields in the place of the weight, the named fields before
// the other keyword arguments. The tensors after the weight, such as expert_ids, are positional. weight_kernel makes
// the dispatcher's function from an implementation, and WeightOperator calls the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "csrc/core/tensor_checks.h"

namespace marlin {

inline constexpr std::string_view kPositionalFields = "Tensor b_packed, Tensor scales";
inline constexpr std::string_view kNamedFields =
    "str weight_format, int group_size, Tensor? zeros=None, Tensor? super_scales=None, "
    "Tensor? super_zeros=None, Tensor? global_scale=None, Tensor? lut=None, Tensor? perm=None, Tensor? b_high=None";

// The tensors of a packed weight and how to read them, in the order of the schema.
template <class Required, class Text, class Optional>
struct WeightFields {
  Required b_packed;
  Required scales;
  Text weight_format;
  int64_t group_size;
  Optional zeros;
  Optional super_scales;
  Optional super_zeros;
  Optional global_scale;
  Optional lut;
  Optional perm;
  Optional b_high;

  auto positional() const { return positional_of(*this); }
  auto positional() { return positional_of(*this); }
  auto optionals() const { return optionals_of(*this); }
  auto optionals() { return optionals_of(*this); }
  auto named() const {
    return std::tuple_cat(std::tuple<std::string_view, int64_t>(weight_format, group_size), optionals());
  }

  // Refers to this weight's fields.
  WeightFields<const Tensor&, std::string_view, const OptionalTensor&> arguments() const {
    return {b_packed,    scales,       weight_format, group_size, zeros, super_scales,
            super_zeros, global_scale, lut,           perm,       b_high};
  }
  // Holds this weight's tensors, so that they can be replaced by others or outlive the call.
  WeightFields<Tensor, std::string, OptionalTensor> own() const {
    return {
        b_packed, scales, std::string(weight_format), group_size, zeros, super_scales, super_zeros, global_scale, lut,
        perm,     b_high};
  }

 private:
  template <class Self>
  static auto positional_of(Self& self) {
    return std::tie(self.b_packed, self.scales);
  }
  template <class Self>
  static auto optionals_of(Self& self) {
    return std::tie(self.zeros, self.super_scales, self.super_zeros, self.global_scale, self.lut, self.perm,
                    self.b_high);
  }
};

using WeightArguments = WeightFields<const Tensor&, std::string_view, const OptionalTensor&>;
using OwnedWeight = WeightFields<Tensor, std::string, OptionalTensor>;

// Returns the dispatcher's schema for one with a `Weight weight`.
inline c10::FunctionSchema weight_schema(std::string text) {
  const auto put = [&text](std::string_view placeholder, std::string_view fields) {
    text.replace(text.find(placeholder), placeholder.size(), fields);
  };
  put("Weight weight", kPositionalFields);
  put("*", "*, " + std::string(kNamedFields));
  return torch::schema(text.c_str());
}

namespace detail {

using PositionalTypes = decltype(std::declval<const WeightArguments&>().positional());
using NamedTypes = decltype(std::declval<const WeightArguments&>().named());

// Converts between one argument for the weight and its fields, for an operator with the arguments `Before` before the
// weight, the tensors `After` after it, and the keyword arguments `Rest`.
template <class Result, class Before, class Positional, class After, class Named, class Rest>
struct Conversion;

template <class Result, class... Before, class... Positional, class... After, class... Named, class... Rest>
struct Conversion<Result, std::tuple<Before...>, std::tuple<Positional...>, std::tuple<After...>, std::tuple<Named...>,
                  std::tuple<Rest...>> {
  using Flat = Result(Before..., Positional..., After..., Named..., Rest...);

  template <auto implementation>
  static Result from_fields(Before... before, Positional... positional, After... after, Named... named, Rest... rest) {
    return implementation(std::forward<Before>(before)..., WeightArguments{positional..., named...}, after...,
                          std::forward<Rest>(rest)...);
  }

  static Result to_fields(const c10::TypedOperatorHandle<Flat>& op, Before... before, const WeightArguments& weight,
                          After... after, Rest... rest) {
    return std::apply([&op](auto&&... arguments) { return op.call(std::forward<decltype(arguments)>(arguments)...); },
                      std::tuple_cat(std::forward_as_tuple(before...), weight.positional(),
                                     std::forward_as_tuple(after...), weight.named(), std::forward_as_tuple(rest...)));
  }
};

// Divides the arguments after the weight.
template <class Result, class Before, class After, class... Rest>
struct AfterWeight {
  using type = Conversion<Result, Before, PositionalTypes, After, NamedTypes, std::tuple<Rest...>>;
};
template <class Result, class Before, class... After, class... Rest>
struct AfterWeight<Result, Before, std::tuple<After...>, const Tensor&, Rest...>
    : AfterWeight<Result, Before, std::tuple<After..., const Tensor&>, Rest...> {};

// Finds the weight among the arguments.
template <class Result, class Before, class... Arguments>
struct FindWeight;
template <class Result, class... Before, class Next, class... Others>
struct FindWeight<Result, std::tuple<Before...>, Next, Others...>
    : FindWeight<Result, std::tuple<Before..., Next>, Others...> {};
template <class Result, class... Before, class... Others>
struct FindWeight<Result, std::tuple<Before...>, const WeightArguments&, Others...>
    : AfterWeight<Result, std::tuple<Before...>, std::tuple<>, Others...> {};

template <class Signature>
struct ConversionOf;
template <class Result, class... Arguments>
struct ConversionOf<Result(Arguments...)> : FindWeight<Result, std::tuple<>, Arguments...> {};

}  // namespace detail

// The dispatcher's function for an implementation with one argument for the weight, as in
// m.impl("gemm", weight_kernel<gemm_cpu>).
// A constant function costs a call fewer instructions than a pointer to it would, because PyTorch's wrapper inlines it.
template <auto implementation>
inline constexpr auto weight_kernel = TORCH_FN(
    detail::ConversionOf<std::remove_pointer_t<decltype(implementation)>>::type::template from_fields<implementation>);

// A handle of an operator that takes no weight.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// A handle of an operator, whose call takes one argument for the weight.
template <class Signature>
class WeightOperator;

template <class Result, class... Arguments>
class WeightOperator<Result(Arguments...)> {
 public:
  explicit WeightOperator(const char* name) : op_(find_operator<typename Conversion::Flat>(name)) {}

  Result call(Arguments... arguments) const {
    return Conversion::to_fields(op_, std::forward<Arguments>(arguments)...);
  }

 private:
  using Conversion = typename detail::ConversionOf<Result(Arguments...)>::type;
  c10::TypedOperatorHandle<typename Conversion::Flat> op_;
};

}  // namespace marlin
