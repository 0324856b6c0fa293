// Replaces a part of libdispatch: the serial queue that orders encoding. It is an Objective-C object, as on a Mac.
#pragma once

#if __has_include_next(<dispatch/dispatch.h>)
#include_next <dispatch/dispatch.h>
#else

#include <stddef.h>
#include <stdint.h>

#ifdef __OBJC__
#include <objc/objc.h>
@protocol OS_dispatch_queue
@end
@class NSObject;
typedef NSObject<OS_dispatch_queue>* dispatch_queue_t;
#else
typedef struct dispatch_queue_s* dispatch_queue_t;
#endif

#ifdef __BLOCKS__
typedef void (^dispatch_block_t)(void);
#ifdef __cplusplus
extern "C" {
#endif
// Runs the block on the queue and waits until it ends. On a Mac, a call from a block of the same queue would deadlock.
// Here such a call is an error.
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
#ifdef __cplusplus
}
#endif
#endif
#endif
