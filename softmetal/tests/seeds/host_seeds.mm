// Seeds: pieces of host code with one fault each, and the corresponding correct code. `run_seed(name, good)` returns
// the numbers that the code computed. If there was an error, it returns "! " and the text of the error. A seed's name
// begins with its class of fault.
#include "../host/host.h"

namespace host {
namespace {

constexpr NSUInteger kCount = 16;
constexpr NSUInteger kBytes = kCount * sizeof(float);

constexpr const char* kSeedSource = R"(
#include <metal_stdlib>
using namespace metal;
struct Params { uint n; float4 v; };
struct Pair { float a; float b; };
kernel void copy(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
kernel void bounded(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) { if (i < 16) y[i] = x[i]; }
kernel void reverse(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) { y[i] = x[15 - i]; }
kernel void plane(device float* y [[buffer(0)]], uint2 p [[thread_position_in_grid]]) { y[p.y * 8 + p.x] = p.x; }
kernel void structure(constant Params& p [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = p.v.x + p.n; }
kernel void pair(constant Pair& p [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = p.a - p.b; }
kernel void staged(device float* y [[buffer(0)]], threadgroup float* t [[threadgroup(0)]],
                   uint i [[thread_position_in_threadgroup]]) {
  t[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = t[15 - i];
}
struct Table { device float* x; device float* y; };
kernel void table(device const Table& t [[buffer(0)]], uint i [[thread_position_in_grid]]) { t.y[i] = t.x[i] + 1; }
kernel void nan(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                uint i [[thread_position_in_grid]]) { float v = x[i] / x[i]; y[i] = v != v ? 1.0f : 2.0f; }
)";

id<MTLLibrary> library_of(const char* source, BOOL safe = YES, MTLLanguageVersion version = MTLLanguageVersion3_1) {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  if (safe) [options setMathMode:MTLMathModeSafe];
  [options setLanguageVersion:version];
  NSError* error = nil;
  id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:source]
                                                  options:options
                                                    error:&error];
  if (library == nil) throw std::runtime_error(text_of(error));
  return library;
}

id<MTLComputePipelineState> state_of(id<MTLFunction> function) {
  NSError* error = nil;
  id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
  if (state == nil) throw std::runtime_error(text_of(error));
  return state;
}

id<MTLComputePipelineState> kernel(const char* name, BOOL safe = YES) {
  static std::map<std::pair<std::string, BOOL>, id<MTLComputePipelineState>> known;
  id<MTLComputePipelineState>& state = known[{name, safe}];
  if (state == nil) {
    static std::map<BOOL, id<MTLLibrary>> libraries;
    if (libraries[safe] == nil) libraries[safe] = library_of(kSeedSource, safe);
    state = state_of([libraries[safe] newFunctionWithName:[NSString stringWithUTF8String:name]]);
  }
  return state;
}

id<MTLComputePipelineState> constants(const std::function<void(MTLFunctionConstantValues*)>& set) {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  NSMutableDictionary* macros = [NSMutableDictionary dictionary];
  [macros setObject:@"0.0f" forKey:@"OFFSET"];
  [options setPreprocessorMacros:macros];
  NSError* error = nil;
  id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:kConstants]
                                                  options:options
                                                    error:&error];
  if (library == nil) throw std::runtime_error(text_of(error));
  MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
  set(values);
  id<MTLFunction> function = [library newFunctionWithName:@"fill" constantValues:values error:&error];
  if (function == nil) throw std::runtime_error(text_of(error));
  return state_of(function);
}

using Values = std::vector<float>;

Values read(id<MTLBuffer> buffer, NSUInteger count = kCount) {
  const auto* numbers = static_cast<const float*>([buffer contents]);
  return {numbers, numbers + count};
}

id<MTLBuffer> numbers(NSUInteger count = kCount) {
  id<MTLBuffer> made = buffer(count * sizeof(float));
  for (NSUInteger i = 0; i < count; ++i)
    static_cast<float*>([made contents])[i] = static_cast<float>(i + 1);
  return made;
}

id<MTLBuffer> storage(const at::Tensor& tensor) {
  return static_cast<id<MTLBuffer>>(const_cast<void*>(tensor.storage().data()));
}

void bind(Encoder e, const char* name, id<MTLBuffer> x, id<MTLBuffer> y) {
  [e setComputePipelineState:kernel(name)];
  [e setBuffer:x offset:0 atIndex:0];
  [e setBuffer:y offset:0 atIndex:1];
}

// Encodes `body` on a queue that does not belong to PyTorch's streams. Uses a new queue if none is given.
id<MTLCommandBuffer> own(const std::function<void(Encoder)>& body, id<MTLCommandQueue> queue = nil) {
  if (queue == nil) queue = [[device() newCommandQueue] autorelease];
  id<MTLCommandBuffer> commands = [queue commandBuffer];
  Encoder e = [commands computeCommandEncoder];
  try {
    body(e);
  } catch (...) {
    [e endEncoding];
    throw;
  }
  [e endEncoding];
  return commands;
}

void run(id<MTLCommandBuffer> commands) {
  [commands commit];
  [commands waitUntilCompleted];
}

Values finished(id<MTLBuffer> y, NSUInteger count = kCount) {
  wait();  // raises an error if checked mode found a fault
  return read(y, count);
}

// Encodes `body` with 16 numbers in x and an empty y. Returns y, to which `body` must copy x.
Values copied(const std::function<void(Encoder, id<MTLBuffer>, id<MTLBuffer>)>& body) {
  id<MTLBuffer> x = numbers(), y = buffer(kBytes);
  encode([&](Encoder e) { body(e, x, y); });
  return finished(y);
}

Values addressed(const std::function<void(Encoder, id<MTLBuffer>, id<MTLBuffer>)>& reside) {
  id<MTLBuffer> x = numbers(), y = zeros(kBytes), table = buffer(16);
  static_cast<uint64_t*>([table contents])[0] = [x gpuAddress];
  static_cast<uint64_t*>([table contents])[1] = [y gpuAddress];
  encode([&](Encoder e) {
    reside(e, x, y);
    [e setComputePipelineState:kernel("table")];
    [e setBuffer:table offset:0 atIndex:0];
    dispatch(e, kCount, kCount);
  });
  return finished(y);
}

using Seeds = std::map<std::string, std::function<Values(bool good)>>;
const MTLResourceUsage kReadWrite = static_cast<MTLResourceUsage>(MTLResourceUsageRead | MTLResourceUsageWrite);

const Seeds& seeds() {
  static const Seeds all{
      {"waiting: a queue of its own reads what torch computes",
       [](bool good) {
         const at::Tensor x = at::full({kCount}, 3.0F, at::device(at::kMPS)).mul(2);
         id<MTLBuffer> y = zeros(kBytes);
         if (good) wait();
         run(own([&](Encoder e) {
           bind(e, "copy", storage(x), y);
           dispatch(e, kCount, kCount);
         }));
         return finished(y);
       }},
      {"waiting: torch reads what a queue of its own has not run",
       [](bool good) {
         const at::Tensor y = at::zeros({kCount}, at::device(at::kMPS));
         wait();
         id<MTLCommandQueue> queue = [[device() newCommandQueue] autorelease];
         id<MTLCommandBuffer> commands = own(
             [&](Encoder e) {
               bind(e, "copy", numbers(), storage(y));
               dispatch(e, kCount, kCount);
             },
             queue);
         [commands commit];
         if (good) [commands waitUntilCompleted];
         const at::Tensor sum = y.add(1).cpu();
         [commands waitUntilCompleted];
         return Values(sum.data_ptr<float>(), sum.data_ptr<float>() + kCount);
       }},
      {"waiting: the host reads a kernel's result at once",
       [](bool good) {
         id<MTLBuffer> y = buffer(kBytes);
         encode([&](Encoder e) {
           bind(e, "copy", numbers(), y);
           dispatch(e, kCount, kCount);
         });
         if (good) wait();
         const Values found = read(y);
         wait();
         return found;
       }},
      {"waiting: the host reads torch's result at once",
       [](bool good) {
         const at::Tensor x = at::full({kCount}, 3.0F, at::device(at::kMPS)).mul(2);
         if (good) wait();
         return read(storage(x));
       }},
      {"waiting: the host replaces an input after the commit",
       [](bool good) {
         id<MTLBuffer> x = numbers(), y = buffer(kBytes);
         id<MTLCommandQueue> queue = [[device() newCommandQueue] autorelease];
         id<MTLCommandBuffer> commands = own(
             [&](Encoder e) {
               bind(e, "copy", x, y);
               dispatch(e, kCount, kCount);
             },
             queue);
         [commands commit];
         if (good) [commands waitUntilCompleted];
         std::memset([x contents], 0, kBytes);
         [commands waitUntilCompleted];
         return read(y);
       }},
      {"waiting: a command buffer that nobody commits",
       [](bool good) {
         id<MTLBuffer> y = buffer(kBytes);
         id<MTLCommandBuffer> commands = own([&](Encoder e) {
           bind(e, "copy", numbers(), y);
           dispatch(e, kCount, kCount);
         });
         if (good) run(commands);
         return read(y);
       }},
      {"waiting: a queue reads what another queue has not run",
       [](bool good) {
         id<MTLBuffer> middle = buffer(kBytes), y = buffer(kBytes);
         id<MTLCommandQueue> queue = [[device() newCommandQueue] autorelease];
         id<MTLCommandBuffer> first = own(
             [&](Encoder e) {
               bind(e, "copy", numbers(), middle);
               dispatch(e, kCount, kCount);
             },
             queue);
         [first commit];
         if (good) [first waitUntilCompleted];
         run(own([&](Encoder e) {
           bind(e, "copy", middle, y);
           dispatch(e, kCount, kCount);
         }));
         [first waitUntilCompleted];
         return finished(y);
       }},
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
           [e dispatchThreadgroups:MTLSizeMake(good ? 2 : kCount / 12, 1, 1)
               threadsPerThreadgroup:MTLSizeMake(12, 1, 1)];
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
      {"residency: addresses without useResource",
       [](bool good) {
         return addressed([&](Encoder e, id<MTLBuffer> x, id<MTLBuffer> y) {
           if (!good) return;
           const std::array<id<MTLResource>, 2> both{x, y};
           [e useResources:both.data() count:2 usage:kReadWrite];
         });
       }},
      {"residency: one of two buffers forgotten",
       [](bool good) {
         return addressed([&](Encoder e, id<MTLBuffer> x, id<MTLBuffer> y) {
           [e useResource:x usage:MTLResourceUsageRead];
           if (good) [e useResource:y usage:MTLResourceUsageWrite];
         });
       }},
      {"residency: a buffer for reading that is written",
       [](bool good) {
         return addressed([&](Encoder e, id<MTLBuffer> x, id<MTLBuffer> y) {
           [e useResource:x usage:MTLResourceUsageRead];
           [e useResource:y usage:good ? MTLResourceUsageWrite : MTLResourceUsageRead];
         });
       }},
      {"copies: a range counted in elements",
       [](bool good) {
         id<MTLBuffer> y = buffer(kBytes);
         blit([&](Blit e) { [e fillBuffer:y range:NSMakeRange(0, kBytes) value:1]; });
         id<MTLCommandBuffer> commands = [[[device() newCommandQueue] autorelease] commandBuffer];
         Blit e = [commands blitCommandEncoder];
         [e fillBuffer:y range:NSMakeRange(0, good ? kBytes : kCount) value:0];
         [e endEncoding];
         run(commands);
         return read(y);
       }},
      {"copies: offsets exchanged",
       [](bool good) {
         id<MTLBuffer> x = numbers(), y = zeros(kBytes);
         id<MTLCommandBuffer> commands = [[[device() newCommandQueue] autorelease] commandBuffer];
         Blit e = [commands blitCommandEncoder];
         copy(e, x, good ? 0 : 16, y, good ? 16 : 0, 32);
         [e endEncoding];
         run(commands);
         return read(y);
       }},
      {"copies: the copy before the kernel",
       [](bool good) {
         id<MTLBuffer> middle = buffer(kBytes), y = buffer(kBytes);
         id<MTLCommandBuffer> commands = [[[device() newCommandQueue] autorelease] commandBuffer];
         for (const bool is_copy : {!good, good}) {
           if (is_copy) {
             Blit e = [commands blitCommandEncoder];
             copy(e, middle, 0, y, 0, kBytes);
             [e endEncoding];
           } else {
             Encoder e = [commands computeCommandEncoder];
             bind(e, "copy", numbers(), middle);
             dispatch(e, kCount, kCount);
             [e endEncoding];
           }
         }
         run(commands);
         return read(y);
       }},
  };
  return all;
}

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
