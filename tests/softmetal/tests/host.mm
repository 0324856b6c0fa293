// Host code as an extension writes it, one scenario per rule of Metal: `run_scenario(name)` gives the error's text, or
// an empty text where all went well.
#include <ATen/Functions.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>
#include <Metal/Metal.h>
#include <torch/mps.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace {

using Encoder = id<MTLComputeCommandEncoder>;

constexpr const char* kSource = R"(
#include <metal_stdlib>
using namespace metal;
kernel void scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant float& factor [[buffer(2)]],
                  uint i [[thread_position_in_grid]]) { y[i] = factor * x[i]; }
kernel void shared(device float* y [[buffer(0)]], threadgroup float* scratch [[threadgroup(0)]],
                   uint i [[thread_position_in_threadgroup]]) {
  scratch[i] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = scratch[i];
}
kernel void declared(device float* y [[buffer(0)]], threadgroup float* more [[threadgroup(0)]],
                     uint i [[thread_position_in_threadgroup]]) {
  threadgroup float scratch[6144];
  scratch[i] = more[0];
  y[i] = scratch[i];
}
[[max_total_threads_per_threadgroup(64)]] kernel void narrow(device float* y [[buffer(0)]],
                                                             uint i [[thread_position_in_grid]]) { y[i] = 1; }
kernel void vectors(device float4* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = float4(1); }
)";

constexpr const char* kConstants = R"(
#include <metal_stdlib>
using namespace metal;
constant uint width [[function_constant(0)]];
constant bool negate [[function_constant(1)]];
kernel void fill(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i] = (negate ? -1.0f : 1.0f) * float(width) + OFFSET;
}
)";

std::string text_of(NSError* error) { return error == nil ? "no error" : [[error localizedDescription] UTF8String]; }

id<MTLDevice> device() { return at::mps::MPSDevice::getInstance()->device(); }

id<MTLComputePipelineState> pipeline(const char* name) {
  static id<MTLLibrary> library = nil;
  NSError* error = nil;
  if (library == nil) {
    MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
    [options setMathMode:MTLMathModeSafe];
    [options setLanguageVersion:MTLLanguageVersion3_1];
    library = [device() newLibraryWithSource:[NSString stringWithUTF8String:kSource] options:options error:&error];
    if (library == nil) throw std::runtime_error(text_of(error));
  }
  id<MTLFunction> function = [[library newFunctionWithName:[NSString stringWithUTF8String:name]] autorelease];
  if (function == nil) throw std::runtime_error(std::string("no function ") + name);
  id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
  if (state == nil) throw std::runtime_error(text_of(error));
  return [state autorelease];
}

id<MTLBuffer> buffer(NSUInteger bytes) {
  id<MTLBuffer> made = [device() newBufferWithLength:bytes options:MTLResourceStorageModeShared];
  return [made autorelease];
}

// Runs `body` in a block of the stream's queue with the shared encoder, as an operator does.
void encode(const std::function<void(Encoder)>& body) {
  auto* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    @autoreleasepool {
      body(stream->commandEncoder());
    }
  });
}

void wait() { at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT_AND_WAIT); }

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string("expected ") + what);
}

void bind_scale(Encoder e, id<MTLBuffer> x, id<MTLBuffer> y, float factor) {
  [e setComputePipelineState:pipeline("scale")];
  [e setBuffer:x offset:0 atIndex:0];
  [e setBuffer:y offset:0 atIndex:1];
  [e setBytes:&factor length:sizeof factor atIndex:2];
}

void dispatch(Encoder e, NSUInteger threads, NSUInteger group) {
  [e dispatchThreads:MTLSizeMake(threads, 1, 1) threadsPerThreadgroup:MTLSizeMake(group, 1, 1)];
}

const std::map<std::string, std::function<void()>> kScenarios = {
    {"correct",
     [] {
       id<MTLBuffer> x = buffer(64), y = buffer(64);
       auto* in = static_cast<float*>([x contents]);
       for (int i = 0; i < 16; ++i) in[i] = static_cast<float>(i);
       encode([&](Encoder e) {
         float factor = 3;
         bind_scale(e, x, y, factor);
         dispatch(e, 16, 8);
         factor = -1;  // setBytes has copied
       });
       expect(static_cast<uint32_t*>([y contents])[1] == 0xFFFFFFFFu, "nothing to run before the wait");
       wait();
       for (int i = 0; i < 16; ++i) expect(static_cast<float*>([y contents])[i] == 3.0F * static_cast<float>(i), "y = 3 x");
     }},
    {"two dispatches, one binding",
     [] {
       encode([](Encoder e) {
         bind_scale(e, buffer(64), buffer(64), 1);
         dispatch(e, 16, 16);
         [e setBufferOffset:16 atIndex:0];
         dispatch(e, 4, 4);
       });
     }},
    {"absent optional",
     [] {
       encode([](Encoder e) {
         bind_scale(e, buffer(64), buffer(64), 1);
         [e setBuffer:nil offset:0 atIndex:7];
         dispatch(e, 16, 16);
       });
     }},
    {"constants and macros",
     [] {
       NSError* error = nil;
       MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
       NSMutableDictionary* macros = [NSMutableDictionary dictionary];
       [macros setObject:@"0.5f" forKey:@"OFFSET"];
       [options setPreprocessorMacros:macros];
       id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:kConstants]
                                                       options:options
                                                         error:&error];
       expect(library != nil, text_of(error).c_str());
       std::vector<id<MTLBuffer>> results;
       for (const uint32_t width : {5u, 9u}) {
         const bool negate = width == 9;
         MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
         [values setConstantValue:&width type:MTLDataTypeUInt atIndex:0];
         [values setConstantValue:&negate type:MTLDataTypeBool withName:@"negate"];
         id<MTLFunction> function = [library newFunctionWithName:@"fill" constantValues:values error:&error];
         expect(function != nil, text_of(error).c_str());
         id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
         expect(state != nil, text_of(error).c_str());
         results.push_back(buffer(16));
         encode([&](Encoder e) {
           [e setComputePipelineState:state];
           [e setBuffer:results.back() offset:0 atIndex:0];
           dispatch(e, 4, 4);
         });
       }
       wait();
       expect(static_cast<float*>([results[0] contents])[3] == 5.5F, "5.5 with width 5");
       expect(static_cast<float*>([results[1] contents])[3] == -8.5F, "-8.5 with width 9, negated");
     }},
    {"missing function constant",
     [] {
       NSError* error = nil;
       MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
       NSMutableDictionary* macros = [NSMutableDictionary dictionary];
       [macros setObject:[NSNumber numberWithInt:0] forKey:@"OFFSET"];
       [options setPreprocessorMacros:macros];
       id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:kConstants]
                                                       options:options
                                                         error:&error];
       expect(library != nil, text_of(error).c_str());
       id<MTLFunction> function = [library newFunctionWithName:@"fill"];
       id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
       encode([&](Encoder e) {
         [e setComputePipelineState:state];
         [e setBuffer:buffer(16) offset:0 atIndex:0];
         dispatch(e, 4, 4);
       });
       wait();
     }},
    {"second encoder",
     [] {
       encode([](Encoder) { [at::mps::getCurrentMPSStream()->commandBuffer() computeCommandEncoder]; });
     }},
    {"slot 31", [] { encode([](Encoder e) { [e setBuffer:buffer(16) offset:0 atIndex:31]; }); }},
    {"setBytes of 4097",
     [] {
       encode([](Encoder e) {
         const std::array<char, 4097> bytes{};
         [e setBytes:bytes.data() length:bytes.size() atIndex:0];
       });
     }},
    {"setBytes of 0",
     [] {
       encode([](Encoder e) {
         const char byte = 0;
         [e setBytes:&byte length:0 atIndex:0];
       });
     }},
    {"1025 threads",
     [] {
       encode([](Encoder e) {
         bind_scale(e, buffer(8192), buffer(8192), 1);
         dispatch(e, 1025, 1025);
       });
     }},
    {"over the pipeline's limit",
     [] {
       expect([pipeline("narrow") maxTotalThreadsPerThreadgroup] == 64, "a limit of 64");
       encode([](Encoder e) {
         [e setComputePipelineState:pipeline("narrow")];
         [e setBuffer:buffer(1024) offset:0 atIndex:0];
         dispatch(e, 65, 65);
       });
     }},
    {"33 KB of threadgroup memory",
     [] {
       encode([](Encoder e) {
         [e setComputePipelineState:pipeline("shared")];
         [e setBuffer:buffer(64) offset:0 atIndex:0];
         [e setThreadgroupMemoryLength:32784 atIndex:0];
         dispatch(e, 16, 16);
       });
     }},
    {"declared and set threadgroup memory",
     [] {
       expect([pipeline("declared") staticThreadgroupMemoryLength] == 24576, "24576 bytes declared");
       encode([](Encoder e) {
         [e setComputePipelineState:pipeline("declared")];
         [e setBuffer:buffer(64) offset:0 atIndex:0];
         [e setThreadgroupMemoryLength:8208 atIndex:0];
         dispatch(e, 16, 16);
       });
     }},
    {"threadgroup length of 20",
     [] {
       encode([](Encoder e) {
         [e setComputePipelineState:pipeline("shared")];
         [e setThreadgroupMemoryLength:20 atIndex:0];
       });
     }},
    {"no threadgroup length",
     [] {
       encode([](Encoder e) {
         [e setComputePipelineState:pipeline("shared")];
         [e setBuffer:buffer(64) offset:0 atIndex:0];
         dispatch(e, 16, 16);
       });
     }},
    {"empty grid",
     [] {
       encode([](Encoder e) {
         bind_scale(e, buffer(64), buffer(64), 1);
         dispatch(e, 0, 16);
       });
     }},
    {"empty threadgroup",
     [] {
       encode([](Encoder e) {
         bind_scale(e, buffer(64), buffer(64), 1);
         [e dispatchThreadgroups:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(16, 0, 1)];
       });
     }},
    {"no pipeline", [] { encode([](Encoder e) { dispatch(e, 16, 16); }); }},
    {"unbound argument",
     [] {
       encode([](Encoder e) {
         [e setComputePipelineState:pipeline("scale")];
         [e setBuffer:buffer(64) offset:0 atIndex:0];
         dispatch(e, 16, 16);
       });
     }},
    {"binding of an earlier operator",
     [] {
       encode([](Encoder e) {
         bind_scale(e, buffer(64), buffer(64), 1);
         dispatch(e, 16, 16);
       });
       encode([](Encoder e) {
         [e setComputePipelineState:pipeline("scale")];
         [e setBuffer:buffer(64) offset:0 atIndex:0];
         [e setBuffer:buffer(64) offset:0 atIndex:1];
         dispatch(e, 16, 16);
       });
     }},
    {"binding of an earlier pipeline",
     [] {
       encode([](Encoder e) {
         bind_scale(e, buffer(64), buffer(64), 1);
         dispatch(e, 16, 16);
         [e setComputePipelineState:pipeline("narrow")];
         dispatch(e, 16, 16);
       });
     }},
    {"threadgroup length of an earlier operator",
     [] {
       for (const bool set : {true, false}) {
         encode([&](Encoder e) {
           [e setComputePipelineState:pipeline("shared")];
           [e setBuffer:buffer(64) offset:0 atIndex:0];
           if (set) [e setThreadgroupMemoryLength:64 atIndex:0];
           dispatch(e, 16, 16);
         });
       }
     }},
    {"offset at the end", [] { encode([](Encoder e) { [e setBuffer:buffer(64) offset:64 atIndex:0]; }); }},
    {"moved offset at the end",
     [] {
       encode([](Encoder e) {
         [e setBuffer:buffer(64) offset:0 atIndex:0];
         [e setBufferOffset:64 atIndex:0];
       });
     }},
    {"misaligned float",
     [] {
       encode([](Encoder e) {
         bind_scale(e, buffer(64), buffer(64), 1);
         [e setBuffer:buffer(64) offset:2 atIndex:0];
         dispatch(e, 4, 4);
       });
     }},
    {"misaligned float4",
     [] {
       encode([](Encoder e) {
         [e setComputePipelineState:pipeline("vectors")];
         [e setBuffer:buffer(64) offset:4 atIndex:0];
         dispatch(e, 2, 2);
       });
     }},
    {"argument too small",
     [] {
       encode([](Encoder e) {
         bind_scale(e, buffer(64), buffer(64), 1);
         const short factor = 1;
         [e setBytes:&factor length:sizeof factor atIndex:2];
         dispatch(e, 16, 16);
       });
     }},
    {"encoding after endEncoding",
     [] {
       id<MTLCommandBuffer> commands = [[[device() newCommandQueue] autorelease] commandBuffer];
       Encoder e = [commands computeCommandEncoder];
       [e endEncoding];
       [e setComputePipelineState:pipeline("scale")];
     }},
    {"commit with an open encoder",
     [] {
       id<MTLCommandBuffer> commands = [[[device() newCommandQueue] autorelease] commandBuffer];
       Encoder e = [commands computeCommandEncoder];
       try {
         [commands commit];
       } catch (...) {
         [e endEncoding];
         throw;
       }
     }},
    {"encoding after commit",
     [] {
       id<MTLCommandBuffer> commands = [[[device() newCommandQueue] autorelease] commandBuffer];
       [commands commit];
       [commands computeCommandEncoder];
     }},
    {"wait before commit",
     [] { [[[[device() newCommandQueue] autorelease] commandBuffer] waitUntilCompleted]; }},
    {"encoder released unended",
     [] {
       @autoreleasepool {
         [[[[device() newCommandQueue] autorelease] commandBuffer] computeCommandEncoder];
       }
       wait();
     }},
    {"re-entrant dispatch_sync", [] { encode([](Encoder) { encode([](Encoder) {}); }); }},
    {"operator in the block",
     [] {
       at::Tensor x = at::empty({4}, at::device(at::kMPS));
       encode([&](Encoder) { x.fill_(1); });
     }},
    {"commit in the block", [] { encode([](Encoder) { torch::mps::commit(); }); }},
    {"synchronize in the block", [] { encode([](Encoder) { wait(); }); }},
    {"raw commit in the block",
     [] {
       encode([](Encoder e) {
         at::mps::getCurrentMPSStream()->endKernelCoalescing();
         (void)e;
         [torch::mps::get_command_buffer() commit];
       });
     }},
    {"encoder outside the queue", [] { (void)at::mps::getCurrentMPSStream()->commandEncoder(); }},
    {"kept encoder",
     [] {
       Encoder kept = nil;
       encode([&](Encoder e) { kept = e; });
       [kept setComputePipelineState:pipeline("scale")];
     }},
    {"own encoder on PyTorch's buffer",
     [] {
       auto* stream = at::mps::getCurrentMPSStream();
       at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
         @autoreleasepool {
           Encoder e = [torch::mps::get_command_buffer() computeCommandEncoder];
           bind_scale(e, buffer(64), buffer(64), 1);
           dispatch(e, 16, 16);
           [e endEncoding];
         }
       });
     }},
    {"exception over dispatch_sync",
     [] { dispatch_sync(at::mps::getCurrentMPSStream()->queue(), ^{ throw std::runtime_error("from the block"); }); }},
    {"exception with rethrow", [] { encode([](Encoder) { throw std::runtime_error("from the block"); }); }},
    {"freed buffer",
     [] {
       id<MTLBuffer> freed = nil;
       @autoreleasepool {
         freed = buffer(64);
       }
       encode([&](Encoder e) { [e setBuffer:freed offset:0 atIndex:0]; });
     }},
    {"buffers live until the work has run",
     [] {
       id<MTLBuffer> y = buffer(64);
       @autoreleasepool {
         id<MTLBuffer> x = buffer(64);
         for (int i = 0; i < 16; ++i) static_cast<float*>([x contents])[i] = 2;
         encode([&](Encoder e) {
           bind_scale(e, x, y, 4);
           dispatch(e, 16, 16);
         });
       }
       wait();
       expect(static_cast<float*>([y contents])[15] == 8, "the freed input's values");
     }},
    {"unpaired profiler",
     [] {
       encode([](Encoder) { at::mps::getMPSProfiler().beginProfileKernel(pipeline("scale"), "scale", false); });
     }},
    {"paired profiler",
     [] {
       encode([](Encoder) {
         id<MTLComputePipelineState> state = pipeline("scale");
         at::mps::getMPSProfiler().beginProfileKernel(state, "scale", false);
         at::mps::getMPSProfiler().endProfileKernel(state);
       });
     }},
    {"blit out of range",
     [] {
       at::mps::getCurrentMPSStream()->copy(buffer(64), buffer(32), 64, 0, 0, 0);
     }},
    {"blit",
     [] {
       id<MTLBuffer> x = buffer(64), y = buffer(64);
       std::memset([x contents], 7, 64);
       at::mps::getCurrentMPSStream()->copy(x, y, 32, 8, 16, 0, at::mps::SyncType::COMMIT_AND_WAIT);
       const auto* bytes = static_cast<const uint8_t*>([y contents]);
       expect(bytes[15] == 0xFF && bytes[16] == 7 && bytes[47] == 7 && bytes[48] == 0xFF, "32 bytes copied, the rest poison");
     }},
    {"device",
     [] {
       expect([device() supportsFamily:MTLGPUFamilyApple7] && ![device() supportsFamily:MTLGPUFamilyApple9], "an M1");
       expect([device() maxThreadgroupMemoryLength] == 32768, "32 KB of threadgroup memory");
       expect([pipeline("scale") threadExecutionWidth] == 32, "32 lanes");
       expect(strcmp([[device() name] UTF8String], "softmetal") == 0, "the name softmetal");
       expect([device() registryID] != 0 && [device() recommendedMaxWorkingSetSize] > 0, "ids and sizes");
     }},
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* run_scenario(const char* name) {
  static std::string message;
  try {
    @autoreleasepool {
      kScenarios.at(name)();
    }
    message.clear();
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}
