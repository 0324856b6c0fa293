// Seeds of host code that waits too little, copies at the wrong time or place, or does not make buffers resident.
#include "host_seeds.h"

namespace host {
namespace {

const MTLResourceUsage kReadWrite = static_cast<MTLResourceUsage>(MTLResourceUsageRead | MTLResourceUsageWrite);

const bool added_seeds_of_order = add_seeds({
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
});

}  // namespace
}  // namespace host
