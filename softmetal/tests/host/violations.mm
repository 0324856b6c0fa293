// Each scenario encodes a command that breaks one rule of Metal.
#include "host.h"

namespace host {
namespace {

const bool added_violations = add({
    {"second encoder",
     [] { encode([](Encoder) { [at::mps::getCurrentMPSStream()->commandBuffer() computeCommandEncoder]; }); }},
    {"slot 31", [] { encode([](Encoder e) { [e setBuffer:buffer(16) offset:0 atIndex:31]; }); }},
    {"constant of another type",
     [] {
       NSError* error = nil;
       id<MTLLibrary> library = [device() newLibraryWithSource:@"constant bool negate [[function_constant(1)]];\n"
                                                               @"kernel void f(device int* y) { y[0] = negate; }"
                                                       options:nil
                                                         error:&error];
       const int one = 1;
       MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
       [values setConstantValue:&one type:MTLDataTypeInt atIndex:1];
       if ([library newFunctionWithName:@"f" constantValues:values error:&error] == nil) {
         throw std::runtime_error(text_of(error));
       }
     }},
    {"constant without a value",
     [] {
       NSError* error = nil;
       id<MTLLibrary> library = [device() newLibraryWithSource:@"constant bool wide [[function_constant(0)]];\n"
                                                               @"constant int rows [[function_constant(1)]];\n"
                                                               @"kernel void f(device int* y) {\n"
                                                               @"  if (wide) y[0] = rows; }"
                                                       options:nil
                                                         error:&error];
       const bool no = false;
       MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
       [values setConstantValue:&no type:MTLDataTypeBool atIndex:0];
       id<MTLFunction> function = [library newFunctionWithName:@"f" constantValues:values error:&error];
       if ([device() newComputePipelineStateWithFunction:function error:&error] == nil) {
         throw std::runtime_error(text_of(error));
       }
     }},
    {"36 KB declared",
     [] {
       NSError* error = nil;
       id<MTLLibrary> library = [device() newLibraryWithSource:@"kernel void f(device int* y) {\n"
                                                               @"threadgroup int x[9216]; x[1] = 2; y[0] = x[1]; }"
                                                       options:nil
                                                         error:&error];
       id<MTLFunction> function = [library newFunctionWithName:@"f"];
       if ([device() newComputePipelineStateWithFunction:function error:&error] == nil) {
         throw std::runtime_error(text_of(error));
       }
     }},
    {"contents of a private buffer",
     [] {
       id<MTLBuffer> made = [device() newBufferWithLength:16 options:MTLResourceStorageModePrivate];
       if ([made contents] == nullptr) throw std::runtime_error("contents is null");
     }},
    {"bytes for a private buffer",
     [] {
       const char byte = 0;
       [device() newBufferWithBytes:&byte length:1 options:MTLResourceStorageModePrivate];
     }},
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
         bind_scale(e, zeros(64), buffer(64), 1);
         dispatch(e, 0, 16);
       });
     }},
    {"empty threadgroup",
     [] {
       encode([](Encoder e) {
         bind_scale(e, zeros(64), buffer(64), 1);
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
    {"nil for an argument",
     [] {
       encode([](Encoder e) {
         bind_scale(e, buffer(64), buffer(64), 1);
         [e setBuffer:nil offset:0 atIndex:1];
         dispatch(e, 16, 16);
       });
     }},
    {"binding of an earlier operator",
     [] {
       encode([](Encoder e) {
         bind_scale(e, zeros(64), buffer(64), 1);
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
         bind_scale(e, zeros(64), buffer(64), 1);
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
         bind_scale(e, zeros(64), buffer(64), 1);
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
         bind_scale(e, zeros(64), buffer(64), 1);
         const short factor = 1;
         [e setBytes:&factor length:sizeof factor atIndex:2];
         dispatch(e, 16, 16);
       });
     }},
    {"threadgroup slot 31", [] { encode([](Encoder e) { [e setThreadgroupMemoryLength:64 atIndex:31]; }); }},
    {"setBytes of null", [] { encode([](Encoder e) { [e setBytes:nullptr length:4 atIndex:0]; }); }},
    {"moved offset of nothing", [] { encode([](Encoder e) { [e setBufferOffset:0 atIndex:5]; }); }},
    {"nil pipeline", [] { encode([](Encoder e) { [e setComputePipelineState:nil]; }); }},
    {"resource of nil", [] { encode([](Encoder e) { [e useResource:nil usage:MTLResourceUsageRead]; }); }},
    {"resource for nothing", [] { encode([](Encoder e) { [e useResource:buffer(16) usage:MTLResourceUsage(0)]; }); }},
    {"barrier of nothing", [] { encode([](Encoder e) { [e memoryBarrierWithScope:MTLBarrierScope(0)]; }); }},
    {"position beyond 32 bits",
     [] {
       encode([](Encoder e) {
         bind_scale(e, zeros(64), buffer(64), 1);
         dispatch(e, NSUInteger{1} << 32, 32);
       });
     }},
    {"blit out of range", [] { at::mps::getCurrentMPSStream()->copy(buffer(64), buffer(32), 64, 0, 0, 0); }},
    {"blit from out of range", [] { blit([](Blit e) { copy(e, buffer(32), 8, buffer(64), 0, 32); }); }},
    {"blit to nil", [] { blit([](Blit e) { copy(e, buffer(32), 0, nil, 0, 32); }); }},
    {"blit of nothing", [] { blit([](Blit e) { copy(e, buffer(32), 0, buffer(32), 0, 0); }); }},
    {"blit onto itself",
     [] {
       blit([](Blit e) {
         id<MTLBuffer> both = buffer(64);
         copy(e, both, 0, both, 16, 32);
       });
     }},
    {"fill of nil", [] { blit([](Blit e) { [e fillBuffer:nil range:NSMakeRange(0, 16) value:0]; }); }},
    {"fill of nothing", [] { blit([](Blit e) { [e fillBuffer:buffer(64) range:NSMakeRange(0, 0) value:0]; }); }},
    {"fill out of range", [] { blit([](Blit e) { [e fillBuffer:buffer(64) range:NSMakeRange(32, 64) value:0]; }); }},
});

}  // namespace
}  // namespace host
