// The fields of a packed weight as one C++ argument. Only this file lists the fields and their positions in a schema.
//
// An implementation has one parameter for the weight, and the text for weight_schema has `Weight weight`:
//   Tensor moe_gemm(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids, bool reduce);
//   moe_gemm(Tensor a, Weight weight, Tensor expert_ids, *, bool reduce=False) -> Tensor
// PyTorch's dispatcher sees each field as an argument of its own. The positional fields replace `Weight weight`. The
// named fields come before the other keyword arguments. Tensors after the weight, such as expert_ids, are positional.
// weight_kernel converts an implementation to the dispatcher's function, and WeightOperator calls the dispatcher.
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

// The tensors, format and group size of a packed weight, in the order of the schema.
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

  // Returns references to this weight's fields.
  WeightFields<const Tensor&, std::string_view, const OptionalTensor&> arguments() const {
    return {b_packed,    scales,       weight_format, group_size, zeros, super_scales,
            super_zeros, global_scale, lut,           perm,       b_high};
  }
  // Returns a copy that owns its fields, so the caller can replace them or keep them after the call.
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

// Returns the schema with the fields of the weight in place of `Weight weight`.
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

// Converts between a WeightArguments and its separate fields. The operator has the arguments `Before` before the
// weight, the tensors `After` after the weight, and the keyword arguments `Rest`.
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

// Splits the arguments after the weight: tensors are positional, all others are keyword arguments.
template <class Result, class Before, class After, class... Rest>
struct AfterWeight {
  using type = Conversion<Result, Before, PositionalTypes, After, NamedTypes, std::tuple<Rest...>>;
};
template <class Result, class Before, class... After, class... Rest>
struct AfterWeight<Result, Before, std::tuple<After...>, const Tensor&, Rest...>
    : AfterWeight<Result, Before, std::tuple<After..., const Tensor&>, Rest...> {};

// Splits an implementation's arguments at the WeightArguments.
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

// The dispatcher's function for an implementation with a WeightArguments parameter, for example m.impl("gemm",
// weight_kernel<gemm_cpu>). A compile-time function costs fewer instructions per call than a function pointer, because
// PyTorch's wrapper inlines it.
template <auto implementation>
inline constexpr auto weight_kernel = TORCH_FN(
    detail::ConversionOf<std::remove_pointer_t<decltype(implementation)>>::type::template from_fields<implementation>);

// Looks up an operator without a weight by its name.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Calls an operator with one WeightArguments in place of the weight's fields.
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
