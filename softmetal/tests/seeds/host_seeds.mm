// Seeds of host code with wrong bindings, parameters, grids or libraries. `run_seed(name, good)` returns the numbers
// that the code computed, or "! " and the text of an error. A seed's name begins with its class of fault.
#include "host_seeds.h"

namespace host {
namespace {

const bool added_seeds = add_seeds({
    {"bindings: input and output exchanged",
     [](bool good) {
       return copied([&](Encoder e, id<MTLBuffer> x, id<MTLBuffer> y) {
         bind(e, "copy", good ? x : y, good ? y : x);
         dispatch(e, kCount, kCount);
       });
     }},
    {"bindings: a view's offset counted twice",
     [](bool good) {
       const at::Tensor x = at::arange(32, at::device(at::kMPS)).to(at::kFloat).slice(0, 8, 24);
       id<MTLBuffer> y = buffer(kBytes);
       encode([&](Encoder e) {
         bind(e, "copy", storage(x), y);
         const auto offset = static_cast<NSUInteger>(x.storage_offset()) * sizeof(float);
         [e setBuffer:storage(x) offset:good ? offset : 2 * offset atIndex:0];
         dispatch(e, kCount, kCount);
       });
       return finished(y);
     }},
    {"bindings: the strides of a view forgotten",
     [](bool good) {
       const at::Tensor whole = at::arange(32, at::device(at::kMPS)).to(at::kFloat).slice(0, 0, 32, 2);
       const at::Tensor x = good ? whole.contiguous() : whole;
       id<MTLBuffer> y = buffer(kBytes);
       encode([&](Encoder e) {
         bind(e, "copy", storage(x), y);
         dispatch(e, kCount, kCount);
       });
       return finished(y);
     }},
    {"bindings: an output with too few elements",
     [](bool good) {
       id<MTLBuffer> y = buffer(good ? kBytes : kBytes - 4);
       encode([&](Encoder e) {
         bind(e, "copy", numbers(), y);
         dispatch(e, kCount, kCount);
       });
       return finished(y, kCount - 1);
     }},
    {"bindings: a write past a view of its storage",
     [](bool good) {
       const at::Tensor y = at::zeros({32}, at::device(at::kMPS)).slice(0, 0, 8);
       encode([&](Encoder e) {
         bind(e, "copy", numbers(), storage(y));
         dispatch(e, good ? 8 : kCount, kCount);
       });
       return finished(storage(y), 8);
     }},
    {"bindings: a slot too far",
     [](bool good) {
       return copied([&](Encoder e, id<MTLBuffer> x, id<MTLBuffer> y) {
         [e setComputePipelineState:kernel("copy")];
         [e setBuffer:x offset:0 atIndex:0];
         [e setBuffer:y offset:0 atIndex:good ? 1 : 2];
         dispatch(e, kCount, kCount);
       });
     }},
    {"bindings: one buffer as input and output",
     [](bool good) {
       id<MTLBuffer> x = numbers(), y = good ? buffer(kBytes) : x;
       encode([&](Encoder e) {
         bind(e, "reverse", x, y);
         dispatch(e, kCount, kCount);
       });
       return finished(y);
     }},
    {"parameters: a structure without its padding",
     [](bool good) {
       id<MTLBuffer> y = buffer(kBytes);
       struct Packed {
         uint32_t n = 2;
         std::array<float, 4> v{3, 4, 5, 6};
       } packed;
       struct alignas(16) Padded {
         uint32_t n = 2;
         alignas(16) std::array<float, 4> v{3, 4, 5, 6};
       } padded;
       encode([&](Encoder e) {
         [e setComputePipelineState:kernel("structure")];
         [e setBytes:good ? static_cast<void*>(&padded) : &packed
              length:good ? sizeof padded : sizeof packed
             atIndex:0];
         [e setBuffer:y offset:0 atIndex:1];
         dispatch(e, 1, 1);
       });
       return finished(y, 1);
     }},
    {"parameters: members in another order",
     [](bool good) {
       id<MTLBuffer> y = buffer(kBytes);
       const std::array<float, 2> values{good ? 5.0F : 2.0F, good ? 2.0F : 5.0F};
       encode([&](Encoder e) {
         [e setComputePipelineState:kernel("pair")];
         [e setBytes:values.data() length:sizeof values atIndex:0];
         [e setBuffer:y offset:0 atIndex:1];
         dispatch(e, 1, 1);
       });
       return finished(y, 1);
     }},
    {"parameters: a double for a float",
     [](bool good) {
       id<MTLBuffer> y = buffer(kBytes);
       const double wide = 3;
       const float narrow = 3;
       encode([&](Encoder e) {
         bind_scale(e, numbers(), y, 1);
         if (good) {
           [e setBytes:&narrow length:sizeof narrow atIndex:2];
         } else {
           [e setBytes:&wide length:sizeof wide atIndex:2];
         }
         dispatch(e, kCount, kCount);
       });
       return finished(y);
     }},
    {"parameters: a half for a float",
     [](bool good) {
       id<MTLBuffer> y = buffer(kBytes);
       const float narrow = 3;
       encode([&](Encoder e) {
         bind_scale(e, numbers(), y, 1);
         [e setBytes:&narrow length:good ? 4 : 2 atIndex:2];
         dispatch(e, kCount, kCount);
       });
       return finished(y);
     }},
    {"grids: threads given as threadgroups",
     [](bool good) {
       return copied([&](Encoder e, id<MTLBuffer> x, id<MTLBuffer> y) {
         bind(e, "copy", x, y);
         [e dispatchThreadgroups:MTLSizeMake(good ? 2 : kCount, 1, 1) threadsPerThreadgroup:MTLSizeMake(8, 1, 1)];
       });
     }},
    {"grids: threadgroups rounded down",
     [](bool good) {
       return copied([&](Encoder e, id<MTLBuffer> x, id<MTLBuffer> y) {
         bind(e, "bounded", x, y);
         [e dispatchThreadgroups:MTLSizeMake(good ? 2 : kCount / 12, 1, 1) threadsPerThreadgroup:MTLSizeMake(12, 1, 1)];
       });
     }},
    {"grids: width and height exchanged",
     [](bool good) {
       id<MTLBuffer> y = buffer(32 * sizeof(float));
       encode([&](Encoder e) {
         [e setComputePipelineState:kernel("plane")];
         [e setBuffer:y offset:0 atIndex:0];
         [e dispatchThreads:good ? MTLSizeMake(8, 4, 1) : MTLSizeMake(4, 8, 1)
             threadsPerThreadgroup:MTLSizeMake(4, 4, 1)];
       });
       return finished(y, 32);
     }},
    {"grids: threadgroup memory counted in elements",
     [](bool good) {
       id<MTLBuffer> y = buffer(kBytes);
       encode([&](Encoder e) {
         [e setComputePipelineState:kernel("staged")];
         [e setBuffer:y offset:0 atIndex:0];
         [e setThreadgroupMemoryLength:good ? kBytes : kCount atIndex:0];
         dispatch(e, kCount, kCount);
       });
       return finished(y);
     }},
    {"libraries: a misspelled function",
     [](bool good) {
       id<MTLLibrary> library = library_of("kernel void right(device float* y) { y[0] = 1; }");
       (void)state_of([library newFunctionWithName:good ? @"right" : @"rihgt"]);
       return Values{};
     }},
    {"libraries: a constant under another's index",
     [](bool good) {
       (void)constants([&](MTLFunctionConstantValues* values) {
         const uint32_t width = 4;
         const bool negate = true;
         [values setConstantValue:&width type:MTLDataTypeUInt atIndex:good ? 0 : 1];
         [values setConstantValue:&negate type:MTLDataTypeBool atIndex:good ? 1 : 0];
       });
       return Values{};
     }},
    {"libraries: a constant under a misspelled name",
     [](bool good) {
       (void)constants([&](MTLFunctionConstantValues* values) {
         const uint32_t width = 4;
         const bool negate = true;
         [values setConstantValue:&width type:MTLDataTypeUInt atIndex:0];
         [values setConstantValue:&negate type:MTLDataTypeBool withName:good ? @"negate" : @"negated"];
       });
       return Values{};
     }},
    {"libraries: a macro that nobody defines",
     [](bool good) {
       (void)library_of(good ? "#define N 3\nkernel void f(device float* y) { y[0] = N; }"
                             : "kernel void f(device float* y) { y[0] = N; }");
       return Values{};
     }},
    {"libraries: bfloat before its language version",
     [](bool good) {
       (void)library_of("#include <metal_stdlib>\nkernel void f(device bfloat* y) { y[0] = bfloat(1); }", YES,
                        good ? MTLLanguageVersion3_1 : MTLLanguageVersion3_0);
       return Values{};
     }},
    {"libraries: the default math mode for code that looks for NaN",
     [](bool good) {
       id<MTLBuffer> y = buffer(kBytes);
       encode([&](Encoder e) {
         [e setComputePipelineState:kernel("nan", good)];
         [e setBuffer:zeros(kBytes) offset:0 atIndex:0];
         [e setBuffer:y offset:0 atIndex:1];
         dispatch(e, kCount, kCount);
       });
       return finished(y);
     }},
});

}  // namespace
}  // namespace host

extern "C" __attribute__((visibility("default"))) const char* seed_names() {
  static std::string names;
  if (names.empty()) {
    for (const auto& [name, body] : host::seeds())
      names += name + "\n";
  }
  return names.c_str();
}

extern "C" __attribute__((visibility("default"))) const char* run_seed(const char* name, int good) {
  static std::string text;
  try {
    @autoreleasepool {
      text.clear();
      for (const float value : host::seeds().at(name)(good != 0))
        text += std::to_string(value) + " ";
    }
  } catch (const c10::Error& error) {
    text = std::string("! ") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = std::string("! ") + error.what();
  }
  return text.c_str();
}
