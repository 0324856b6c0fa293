// The few operators that need the device. All other operators run on the CPU through one boxed fallback.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "torch_generator.h"

namespace softmetal {
namespace {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::MPS);

void require_type(at::ScalarType type) {
  TORCH_CHECK_TYPE(type != at::kDouble && type != at::kComplexDouble,
                   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
                   "Please use float32 instead.");
}

void require_device(optional<at::Device> device) {
  TORCH_CHECK(!device.has_value() || device->index() <= 0, "expected mps device 0, got ",
              static_cast<int>(device->index()));
}

Tensor empty(IntArrayRef size, optional<at::ScalarType> type, optional<at::Layout>, optional<at::Device> device,
             optional<bool>, optional<at::MemoryFormat> format) {
  const at::ScalarType dtype = c10::dtype_or_default(type);
  require_type(dtype);
  require_device(device);
  return at::detail::empty_generic(size, &allocator(), kKeys, dtype, format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> type, optional<at::Layout>,
                     optional<at::Device> device, optional<bool>) {
  const at::ScalarType dtype = c10::dtype_or_default(type);
  require_type(dtype);
  require_device(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, dtype);
}

// Returns a CPU tensor over the bytes of `tensor`. While the CPU tensor is used, the stream must be idle.
Tensor host_view(const Tensor& tensor) {
  if (!tensor.is_mps()) return tensor;
  Tensor view;
  if (tensor.numel() == 0 || buffer_of(tensor) == nil) {
    view = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  } else {
    uint8_t* bytes =
        buffer_of(tensor)->memory->bytes() + static_cast<size_t>(tensor.storage_offset()) * tensor.element_size();
    view = at::from_blob(bytes, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  }
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

// The bytes of a tensor's elements. fill() sets them in an array that has one byte for each byte of the storage.
class ElementBytes {
 public:
  explicit ElementBytes(const Tensor& tensor)
      : item_(tensor.element_size()),
        start_(static_cast<size_t>(tensor.storage_offset()) * item_),
        dense_(tensor.is_non_overlapping_and_dense() ? static_cast<size_t>(tensor.numel()) * item_ : 0),
        sizes_(tensor.sizes().vec()) {
    const auto bytes = static_cast<int64_t>(item_);
    for (const int64_t stride : tensor.strides())
      strides_.push_back(stride * bytes);
    sizes_.push_back(bytes);
    strides_.push_back(1);
  }
  void fill(uint8_t* array, uint8_t value) const {
    if (array == nullptr) return;
    if (dense_ != 0) {
      std::memset(array + start_, value, dense_);
    } else {
      at::from_blob(array + start_, sizes_, strides_, at::TensorOptions(at::kByte)).fill_(value);
    }
  }

 private:
  size_t item_, start_, dense_;
  std::vector<int64_t> sizes_, strides_;
};

// True while an operator that ran on the CPU copies its results to mps tensors.
thread_local bool copies_results = false;

class CopiesResults {
 public:
  CopiesResults() : before_(std::exchange(copies_results, true)) {}
  ~CopiesResults() { copies_results = before_; }
  CopiesResults(const CopiesResults&) = delete;
  CopiesResults& operator=(const CopiesResults&) = delete;

 private:
  bool before_;
};

// Writes the values of `source` to an mps tensor by a command of the stream. Until the command runs, the tensor holds
// poison. As on a Mac, code must therefore wait for the stream before it reads the values.
void copy_later(const Tensor& self, const Tensor& source) {
  Tensor destination = host_view(self);
  const Tensor values = host_view(source);
  at::assert_no_internal_overlap(destination);
  at::assert_no_partial_overlap(destination, values);
  const bool is_dense = self.is_non_overlapping_and_dense();
  Tensor staged = is_dense ? at::empty_strided(self.sizes(), self.strides(), destination.options())
                           : at::empty(self.sizes(), destination.options());
  staged._set_conj(self.is_conj());
  staged._set_neg(self.is_neg());
  staged.copy_(values);
  Memory& memory = *buffer_of(self)->memory;
  const ElementBytes elements(self);
  elements.fill(memory.bytes(), kFreshPoison);
  elements.fill(memory.initialised(), 0);
  write_later(memory, [destination, staged, elements, is_dense, &memory]() mutable {
    const c10::InferenceMode guard;  // the tensors may have been made in inference mode
    if (is_dense) {
      std::memcpy(destination.data_ptr(), staged.data_ptr(), staged.nbytes());
    } else {
      destination.copy_(staged);
    }
    elements.fill(memory.initialised(), 1);
  });
}

// Returns whether operators return before their results are written, as on a Mac. A command of the stream then writes
// the results.
bool operators_are_queued() {
  static const bool queued = [] {
    const char* text = std::getenv("SOFTMETAL_QUEUE_OPERATORS");
    return text != nullptr && *text != '\0' && std::strcmp(text, "0") != 0;
  }();
  return queued;
}

// As in PyTorch's copy_and_sync, a blocking copy from the CPU is complete when this function returns. For all other
// copies to mps tensors, and for the results of operators, a command of the stream may write the values later.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0 || self.is_same(source)) return self;
  // Earlier commands may read `self` or write `source`. When an operator's results are copied, the operator has already
  // waited for these commands.
  if (!copies_results || source.is_mps()) synchronize();
  if (operators_are_queued() && self.is_mps() && (copies_results || non_blocking || source.is_mps())) {
    copy_later(self, source);
    return self;
  }
  host_view(self).copy_(host_view(source));
  if (self.is_mps()) ElementBytes(self).fill(buffer_of(self)->memory->initialised(), 1);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& destination, bool non_blocking) {
  Tensor out = destination;
  copy_(out, self, non_blocking);
  return destination;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  synchronize();
  return host_view(self).item();
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat> format) {
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  // If the size is unchanged, a view keeps its strides, as with torch's own resize_.
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const c10::Storage& storage = impl->unsafe_storage();
  const size_t needed =
      (static_cast<size_t>(self.numel()) + static_cast<size_t>(self.storage_offset())) * self.element_size();
  if (self.numel() == 0 || needed <= storage.nbytes()) return self;
  c10::DataPtr grown = allocator().allocate(needed);
  if (storage.nbytes() != 0) allocator().copy_data(grown.get(), storage.data(), storage.nbytes());
  storage.set_data_ptr(std::move(grown));
  storage.set_nbytes(needed);
  return self;
}

Tensor& set_storage_offset(Tensor& self, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  const int64_t end =
      self.numel() == 0 ? 0 : offset + at::detail::computeStorageNbytes(self.sizes(), self.strides(), 1);
  TORCH_CHECK(static_cast<size_t>(end) * self.element_size() <= impl->unsafe_storage().nbytes(), "set_: sizes ",
              self.sizes(), ", strides ", self.strides(), " and offset ", offset, " need more than the storage's ",
              impl->unsafe_storage().nbytes(), " bytes");
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage_offset(self, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  return set_storage_offset(
      self, c10::Storage(c10::Storage::use_byte_size_t{}, 0, allocator().allocate(0), &allocator(), true), 0, {0}, {});
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& mask,
                 double dropout, bool causal, optional<double> scale, bool grouped) {
  // at::_scaled_dot_product_attention_math adds a mask of booleans as numbers, so the mask is converted to numbers
  // first.
  optional<Tensor> numbers = mask;
  if (mask.has_value() && mask->scalar_type() == at::kBool) {
    numbers = at::zeros(mask->sizes(), query.options())
                  .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  }
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, numbers, dropout, causal, {}, scale, grouped));
}

Tensor convolution(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  const CopiesResults results;
  const optional<Tensor> host_bias = bias.has_value() && bias->defined() ? optional(bias->cpu()) : std::nullopt;
  return at::convolution(input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed, output_padding,
                         groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                                        IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  const CopiesResults results;
  const std::array<int64_t, 1> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  const auto host = at::convolution_backward(gradient.cpu(), input.cpu(), weight.cpu(), IntArrayRef(bias_sizes), stride,
                                             padding, dilation, transposed, output_padding, groups, mask);
  const auto back = [&](const Tensor& t) { return t.defined() ? t.to(input.device()) : t; };
  return {back(std::get<0>(host)), back(std::get<1>(host)), back(std::get<2>(host))};
}

// On a Mac, an operator accepts only scalars and indices from another device. The CPU fallback would accept any tensor,
// so this check refuses other tensors of another device.
void require_one_device(const std::string& name, at::ArrayRef<c10::IValue> values) {
  if (name.find("index") != std::string::npos) return;
  const auto require = [&name](const Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || tensor.dim() == 0 || tensor.is_mps(), name,
                ": expected all tensors on mps, got one of sizes ", tensor.sizes(), " on ", tensor.device());
  };
  for (const c10::IValue& value : values) {
    if (value.isTensor()) require(value.toTensor());
    if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector())
        require(tensor);
    }
  }
}

bool takes_generator(const c10::Type& type) {
  if (const auto* optional_type = type.castRaw<c10::OptionalType>())
    return takes_generator(*optional_type->getElementType());
  return type.kind() == c10::TypeKind::GeneratorType;
}

// Before torch 2.15, if alpha is 0, `add` and `sub` on mps copy `self` and do not read `other`. For example, a NaN in
// `other` does not reach the result.
void drop_what_is_not_read(const std::string& name, at::ArrayRef<c10::IValue> values, c10::IValue* other) {
  const bool is_sum = name == "aten::add" || name == "aten::add_" || name == "aten::sub" || name == "aten::sub_";
  if (SOFTMETAL_TORCH_2(15) || !is_sum || values.size() < 3 || !values[1].isTensor() || !values[2].isScalar()) return;
  if (values[2].toScalar().equal(0)) *other = at::zeros_like(values[1].toTensor());
}

// A CPU operator needs a CPU generator. The operator gets a copy of the mps generator in its arguments, or of the
// default mps generator. Afterwards the state of the copy is copied back.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  synchronize();
  const auto& arguments = op.schema().arguments();
  require_one_device(op.schema().name(), torch::jit::last(*stack, arguments.size()));
  drop_what_is_not_read(op.schema().name(), torch::jit::last(*stack, arguments.size()),
                        stack->data() + (stack->size() - arguments.size() + 1));
  at::Generator device, host;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
    if (!takes_generator(*arguments[i].type()) ||
        !(value.isNone() || (value.isGenerator() && value.toGenerator().device().is_mps())))
      continue;
    device = value.isNone() ? default_generator() : value.toGenerator();
    host = at::detail::createCPUGenerator();
    host.set_state(device.get_state());
    value = host;
  }
  {
    const CopiesResults results;
    at::native::cpu_fallback(op, stack);
  }
  if (device.defined()) device.set_state(host.get_state());
}

TORCH_LIBRARY_IMPL(_, MPS, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, MPS, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_empty);
  library.impl("scaled_dot_product_attention", &attention);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradMPS, library) {
  library.impl("scaled_dot_product_attention", &attention);
}

}  // namespace
}  // namespace softmetal
