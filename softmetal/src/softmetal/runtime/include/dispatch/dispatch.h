// Stand-in for two parts of libdispatch: the serial queue that orders encoding, and data in memory. A queue and a piece
// of data are Objective-C objects, as on a Mac.
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
@protocol OS_dispatch_data
@end
typedef NSObject<OS_dispatch_data>* dispatch_data_t;
#else
typedef struct dispatch_queue_s* dispatch_queue_t;
#endif

#ifdef __BLOCKS__
typedef void (^dispatch_block_t)(void);
#ifdef __cplusplus
extern "C" {
#endif
// Runs the block on the queue and waits for its end. On a Mac, a call from a block of this same queue would deadlock.
// Here such a call is an error.
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
#ifdef __OBJC__
// The default destructor means that the bytes are copied.
#define DISPATCH_DATA_DESTRUCTOR_DEFAULT NULL
dispatch_data_t dispatch_data_create(const void* buffer, size_t size, dispatch_queue_t queue,
                                     dispatch_block_t destructor);
// Returns the data in one piece, and the address and size of that piece.
dispatch_data_t dispatch_data_create_map(dispatch_data_t data, const void** buffer_ptr, size_t* size_ptr);
#endif
#ifdef __cplusplus
}
#endif
#endif
#endif
