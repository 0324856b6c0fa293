// Replaces the part of Apple's Foundation that Metal host code uses. Classes, selectors and types are Apple's.
#pragma once

#include <dispatch/dispatch.h>
#include <objc/objc.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __GNU_LIBOBJC__
// GNU libobjc defines nil as (id)0. In C++ this is not a null pointer constant, so it could not be passed as NSError**.
#undef nil
#undef Nil
#define nil nullptr
#define Nil nullptr
#endif

#define NS_ASSUME_NONNULL_BEGIN _Pragma("clang assume_nonnull begin")
#define NS_ASSUME_NONNULL_END _Pragma("clang assume_nonnull end")
#define NS_ENUM(type, name) \
  enum name : type name;    \
  enum name : type
#define NS_OPTIONS(type, name) \
  enum name : type name;       \
  enum name : type

#ifdef __cplusplus
#define FOUNDATION_EXPORT extern "C"
#else
#define FOUNDATION_EXPORT extern
#endif

#ifdef __GNU_LIBOBJC__
// With the GNU runtime, an @interface must declare all instance variables of its class.
#define STAND_IN_STATE \
  {                    \
   @public             \
    void* _state;      \
  }
#else
#define STAND_IN_STATE
#endif

typedef long NSInteger;
typedef unsigned long NSUInteger;
typedef struct _NSRange {
  NSUInteger location;
  NSUInteger length;
} NSRange;
static inline NSRange NSMakeRange(NSUInteger location, NSUInteger length) {
  NSRange range = {location, length};
  return range;
}
typedef NSUInteger NSStringEncoding;
enum { NSASCIIStringEncoding = 1, NSUTF8StringEncoding = 4 };

@class NSString;
typedef NSString* NSErrorDomain;
typedef NSString* NSErrorUserInfoKey;

#if __has_include(<objc/NSObject.h>)
#include <objc/NSObject.h>  // Apple's runtime declares the root class
#else
@protocol NSObject
- (BOOL)isEqual:(id)object;
- (NSUInteger)hash;
- (Class)class;
- (BOOL)isKindOfClass:(Class)aClass;
- (BOOL)respondsToSelector:(SEL)aSelector;
- (id)retain;
- (oneway void)release;
- (id)autorelease;
- (NSUInteger)retainCount;
- (NSString*)description;
@end

__attribute__((objc_root_class))
@interface NSObject<NSObject> {
  Class isa;
}
+ (id)alloc;
+ (id)new;
+ (Class)class;
- (id)init;
- (void)dealloc;
@end
#endif

@protocol NSCopying
@end

@interface NSString : NSObject <NSCopying>
+ (instancetype)stringWithUTF8String:(const char*)nullTerminatedCString;
+ (instancetype)stringWithCString:(const char*)cString encoding:(NSStringEncoding)enc;
- (instancetype)initWithUTF8String:(const char*)nullTerminatedCString;
- (instancetype)initWithBytes:(const void*)bytes length:(NSUInteger)len encoding:(NSStringEncoding)encoding;
- (const char*)UTF8String;
- (NSUInteger)length;
- (BOOL)isEqualToString:(NSString*)aString;
@end

@interface NSNumber : NSObject <NSCopying>
STAND_IN_STATE
+ (NSNumber*)numberWithInt:(int)value;
+ (NSNumber*)numberWithUnsignedInt:(unsigned int)value;
+ (NSNumber*)numberWithLong:(long)value;
+ (NSNumber*)numberWithUnsignedLong:(unsigned long)value;
+ (NSNumber*)numberWithLongLong:(long long)value;
+ (NSNumber*)numberWithBool:(BOOL)value;
+ (NSNumber*)numberWithFloat:(float)value;
+ (NSNumber*)numberWithDouble:(double)value;
- (NSString*)stringValue;
- (long long)longLongValue;
- (double)doubleValue;
@end

@interface NSArray<ObjectType> : NSObject <NSCopying>
STAND_IN_STATE
+ (instancetype)arrayWithObjects:(const ObjectType[])objects count:(NSUInteger)cnt;
- (NSUInteger)count;
- (ObjectType)objectAtIndex:(NSUInteger)index;
- (ObjectType)objectAtIndexedSubscript:(NSUInteger)idx;
@end

@interface NSDictionary<KeyType, ObjectType> : NSObject <NSCopying>
STAND_IN_STATE
+ (instancetype)dictionaryWithObjects:(const ObjectType[])objects
                              forKeys:(const KeyType<NSCopying>[])keys
                                count:(NSUInteger)cnt;
- (NSUInteger)count;
- (NSArray<KeyType>*)allKeys;
- (ObjectType)objectForKey:(KeyType)aKey;
- (ObjectType)objectForKeyedSubscript:(KeyType)key;
@end

@interface NSMutableDictionary<KeyType, ObjectType> : NSDictionary <KeyType, ObjectType>
+ (instancetype)dictionary;
- (void)setObject:(ObjectType)anObject forKey:(KeyType<NSCopying>)aKey;
- (void)setObject:(ObjectType)obj forKeyedSubscript:(KeyType<NSCopying>)key;
@end

@interface NSError : NSObject <NSCopying>
STAND_IN_STATE
+ (instancetype)errorWithDomain:(NSErrorDomain)domain
                           code:(NSInteger)code
                       userInfo:(NSDictionary<NSErrorUserInfoKey, id>*)dict;
@property(readonly) NSInteger code;
@property(readonly, copy) NSErrorDomain domain;
@property(readonly, copy) NSString* localizedDescription;
@end
FOUNDATION_EXPORT NSErrorUserInfoKey const NSLocalizedDescriptionKey;

typedef struct {
  NSInteger majorVersion;
  NSInteger minorVersion;
  NSInteger patchVersion;
} NSOperatingSystemVersion;

@interface NSProcessInfo : NSObject
+ (NSProcessInfo*)processInfo;
- (NSOperatingSystemVersion)operatingSystemVersion;
@end

@interface NSAutoreleasePool : NSObject
STAND_IN_STATE
+ (void)addObject:(id)anObject;
- (void)drain;
@end

FOUNDATION_EXPORT void NSLog(NSString* format, ...);
