// Stand-in header with the one class that ATen/mps/MPSStream.h names. On a Mac, MPSCommandBuffer wraps a command buffer
// and conforms to the protocol MTLCommandBuffer.
#pragma once

#include <Metal/Metal.h>

@interface MPSCommandBuffer : NSObject <MTLCommandBuffer>
STAND_IN_STATE
+ (MPSCommandBuffer*)commandBufferFromCommandQueue:(id<MTLCommandQueue>)commandQueue;
@property(readonly, nonatomic) id<MTLCommandBuffer> rootCommandBuffer;
- (void)commitAndContinue;
@end
