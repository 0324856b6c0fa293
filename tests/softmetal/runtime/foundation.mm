// The part of Foundation that Metal host code uses, on GNU libobjc: reference counts, pools, strings, collections.
#include <Foundation/Foundation.h>
#include <objc/runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <unwind.h>
#include <vector>

#include "object.h"

extern "C" _Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class, _Unwind_Exception*,
                                                    _Unwind_Context*);
// Objective-C++ frames of host code let C++ exceptions through only with the C++ personality; this library is loaded
// globally before libobjc is looked at, so its definition is the one that binds.
extern "C" __attribute__((visibility("default"))) _Unwind_Reason_Code __gnu_objc_personality_v0(
    int version, _Unwind_Action actions, _Unwind_Exception_Class kind, _Unwind_Exception* exception,
    _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, kind, exception, context);
}

namespace {

// Lies in front of every object: GNU libobjc has no place for a count.
struct Header {
  std::atomic<NSUInteger> references;
  NSUInteger padding;
};
Header* header(id object) { return reinterpret_cast<Header*>(object) - 1; }

struct Pools {
  std::vector<std::vector<id>> stack;
};
thread_local Pools pools;

struct Number {
  long long integer;
  double floating;
  bool is_floating;
};
using Objects = std::vector<id>;
Objects& objects_of(NSArray* array) { return *static_cast<Objects*>(array->_state); }
using Entries = std::map<std::string, std::pair<id, id>>;  // by the key's text: keys are strings here
Entries& entries_of(NSDictionary* dictionary) { return *static_cast<Entries*>(dictionary->_state); }

void set_entry(NSDictionary* dictionary, id key, id object) {
  std::pair<id, id>& entry = entries_of(dictionary)[[[key description] UTF8String]];
  [object retain];
  [key retain];
  [entry.first release];
  [entry.second release];
  entry = {key, object};
}

struct Failure {
  NSErrorDomain domain;
  NSInteger code;
  NSDictionary* info;
};

}  // namespace

namespace softmetal {
id create_instance(Class cls) {
  const size_t bytes = class_getInstanceSize(cls);
  auto* memory = static_cast<Header*>(std::calloc(1, sizeof(Header) + bytes));
  if (memory == nullptr) throw std::bad_alloc();
  memory->references = 1;
  id object = reinterpret_cast<id>(memory + 1);
  object_setClass(object, cls);
  return object;
}
void free_instance(id object) { std::free(header(object)); }
}  // namespace softmetal

@implementation NSObject
+ (id)alloc {
  return softmetal::create_instance(self);
}
+ (id)new {
  return [[self alloc] init];
}
+ (Class)class {
  return self;
}
+ (id)retain {
  return self;
}
+ (oneway void)release {
}
+ (void)initialize {
}
- (id)init {
  return self;
}
- (void)dealloc {
  softmetal::free_instance(self);
}
- (id)retain {
  header(self)->references.fetch_add(1, std::memory_order_relaxed);
  return self;
}
- (oneway void)release {
  if (header(self)->references.fetch_sub(1, std::memory_order_acq_rel) == 1) [self dealloc];
}
- (id)autorelease {
  [NSAutoreleasePool addObject:self];
  return self;
}
- (NSUInteger)retainCount {
  return header(self)->references;
}
- (BOOL)isEqual:(id)object {
  return self == object;
}
- (NSUInteger)hash {
  return reinterpret_cast<NSUInteger>(self);
}
- (Class)class {
  return object_getClass(self);
}
- (BOOL)isKindOfClass:(Class)aClass {
  for (Class cls = object_getClass(self); cls != Nil; cls = class_getSuperclass(cls)) {
    if (cls == aClass) return YES;
  }
  return NO;
}
- (BOOL)respondsToSelector:(SEL)aSelector {
  return class_respondsToSelector(object_getClass(self), aSelector);
}
- (NSString*)description {
  const std::string text = std::string("<") + class_getName(object_getClass(self)) + ">";
  return [NSString stringWithUTF8String:text.c_str()];
}
@end

@implementation NSAutoreleasePool
+ (void)addObject:(id)anObject {
  if (!pools.stack.empty()) pools.stack.back().push_back(anObject);  // without a pool the object leaks, as on a Mac
}
- (id)init {
  pools.stack.emplace_back();
  _state = reinterpret_cast<void*>(pools.stack.size());  // this pool's depth
  return self;
}
- (void)drain {
  // An exception skips the drain of inner pools: the outer one takes them along.
  while (pools.stack.size() >= reinterpret_cast<size_t>(_state)) {
    const std::vector<id> objects = std::move(pools.stack.back());
    pools.stack.back().clear();
    for (id object : objects) [object release];
    if (pools.stack.back().empty()) pools.stack.pop_back();
  }
  [self dealloc];
}
- (oneway void)release {
  [self drain];
}
@end

@implementation NSString
+ (instancetype)stringWithUTF8String:(const char*)text {
  return [[[self alloc] initWithUTF8String:text] autorelease];
}
+ (instancetype)stringWithCString:(const char*)text encoding:(NSStringEncoding)encoding {
  return [[[self alloc] initWithBytes:text length:std::strlen(text) encoding:encoding] autorelease];
}
+ (id)alloc {
  return softmetal::create_instance(self == [NSString class] ? objc_getClass("SoftMetalString") : self);
}
- (instancetype)initWithUTF8String:(const char*)text {
  return [self initWithBytes:text length:std::strlen(text) encoding:NSUTF8StringEncoding];
}
- (instancetype)initWithBytes:(const void*)bytes length:(NSUInteger)length encoding:(NSStringEncoding)encoding {
  (void)bytes, (void)length, (void)encoding;
  return nil;
}
- (const char*)UTF8String {
  return "";
}
- (NSUInteger)length {
  return std::strlen([self UTF8String]);
}
- (BOOL)isEqualToString:(NSString*)other {
  return other != nil && std::strcmp([self UTF8String], [other UTF8String]) == 0;
}
- (BOOL)isEqual:(id)object {
  return [object isKindOfClass:[NSString class]] && [self isEqualToString:object];
}
- (NSUInteger)hash {
  return std::hash<std::string>()([self UTF8String]);
}
- (NSString*)description {
  return self;
}
@end

@interface SoftMetalString : NSString {
  std::string* _text;
}
@end
@implementation SoftMetalString
- (instancetype)initWithBytes:(const void*)bytes length:(NSUInteger)length encoding:(NSStringEncoding)encoding {
  std::string text(static_cast<const char*>(bytes), length);
  const bool ascii = std::all_of(text.begin(), text.end(), [](char c) { return static_cast<signed char>(c) >= 0; });
  if (encoding == NSASCIIStringEncoding && !ascii) {
    [self release];
    return nil;
  }
  _text = new std::string(std::move(text));
  return self;
}
- (void)dealloc {
  delete _text;
  [super dealloc];
}
- (const char*)UTF8String {
  return _text->c_str();
}
@end

// The layout that the compiler gives to @"..." literals.
@interface NSConstantString : NSString {
  const char* _characters;
  unsigned int _length;
}
@end
@implementation NSConstantString
- (const char*)UTF8String {
  return _characters;
}
- (NSUInteger)length {
  return _length;
}
- (id)retain {
  return self;
}
- (oneway void)release {
}
- (id)autorelease {
  return self;
}
@end

@implementation NSNumber
- (void)dealloc {
  delete static_cast<Number*>(_state);
  [super dealloc];
}
+ (NSNumber*)softmetalInteger:(long long)value {
  NSNumber* number = [[self alloc] init];
  number->_state = new Number{value, static_cast<double>(value), false};
  return [number autorelease];
}
+ (NSNumber*)softmetalFloating:(double)value {
  NSNumber* number = [[self alloc] init];
  number->_state = new Number{static_cast<long long>(value), value, true};
  return [number autorelease];
}
+ (NSNumber*)numberWithInt:(int)value {
  return [self softmetalInteger:value];
}
+ (NSNumber*)numberWithUnsignedInt:(unsigned int)value {
  return [self softmetalInteger:value];
}
+ (NSNumber*)numberWithLong:(long)value {
  return [self softmetalInteger:value];
}
+ (NSNumber*)numberWithUnsignedLong:(unsigned long)value {
  return [self softmetalInteger:static_cast<long long>(value)];
}
+ (NSNumber*)numberWithLongLong:(long long)value {
  return [self softmetalInteger:value];
}
+ (NSNumber*)numberWithBool:(BOOL)value {
  return [self softmetalInteger:value];
}
+ (NSNumber*)numberWithFloat:(float)value {
  return [self softmetalFloating:static_cast<double>(value)];
}
+ (NSNumber*)numberWithDouble:(double)value {
  return [self softmetalFloating:value];
}
- (NSString*)stringValue {
  const auto& number = *static_cast<Number*>(_state);
  std::array<char, 40> text;
  if (number.is_floating) {
    std::snprintf(text.data(), text.size(), "%.17g", number.floating);
  } else {
    std::snprintf(text.data(), text.size(), "%lld", number.integer);
  }
  return [NSString stringWithUTF8String:text.data()];
}
- (long long)longLongValue {
  return static_cast<Number*>(_state)->integer;
}
- (double)doubleValue {
  return static_cast<Number*>(_state)->floating;
}
- (NSString*)description {
  return [self stringValue];
}
@end

@implementation NSArray
+ (instancetype)arrayWithObjects:(const id*)objects count:(NSUInteger)count {
  NSArray* array = [[[self alloc] init] autorelease];
  for (NSUInteger i = 0; i < count; ++i) objects_of(array).push_back([objects[i] retain]);
  return array;
}
- (id)init {
  _state = new Objects();
  return self;
}
- (void)dealloc {
  for (id object : objects_of(self)) [object release];
  delete static_cast<Objects*>(_state);
  [super dealloc];
}
- (NSUInteger)count {
  return objects_of(self).size();
}
- (id)objectAtIndex:(NSUInteger)index {
  return objects_of(self).at(index);
}
- (id)objectAtIndexedSubscript:(NSUInteger)index {
  return objects_of(self).at(index);
}
@end

@implementation NSDictionary
+ (instancetype)dictionaryWithObjects:(const id*)objects forKeys:(const id<NSCopying>*)keys count:(NSUInteger)count {
  NSDictionary* dictionary = [[[self alloc] init] autorelease];
  for (NSUInteger i = 0; i < count; ++i) set_entry(dictionary, keys[i], objects[i]);
  return dictionary;
}
- (id)init {
  _state = new Entries();
  return self;
}
- (void)dealloc {
  for (const auto& [text, entry] : entries_of(self)) {
    [entry.first release];
    [entry.second release];
  }
  delete static_cast<Entries*>(_state);
  [super dealloc];
}
- (NSUInteger)count {
  return entries_of(self).size();
}
- (NSArray*)allKeys {
  Objects keys;
  for (const auto& [text, entry] : entries_of(self)) keys.push_back(entry.first);
  return [NSArray arrayWithObjects:keys.data() count:keys.size()];
}
- (id)objectForKey:(id)key {
  const auto found = entries_of(self).find([[key description] UTF8String]);
  return found == entries_of(self).end() ? nil : found->second.second;
}
- (id)objectForKeyedSubscript:(id)key {
  return [self objectForKey:key];
}
@end

@implementation NSMutableDictionary
+ (instancetype)dictionary {
  return [[[self alloc] init] autorelease];
}
- (void)setObject:(id)object forKey:(id)key {
  set_entry(self, key, object);
}
- (void)setObject:(id)object forKeyedSubscript:(id)key {
  set_entry(self, key, object);
}
@end

NSErrorUserInfoKey const NSLocalizedDescriptionKey = @"NSLocalizedDescription";

@implementation NSError
+ (instancetype)errorWithDomain:(NSErrorDomain)domain code:(NSInteger)code userInfo:(NSDictionary*)info {
  NSError* error = [[[self alloc] init] autorelease];
  error->_state = new Failure{[domain retain], code, [info retain]};
  return error;
}
- (void)dealloc {
  auto* failure = static_cast<Failure*>(_state);
  [failure->domain release];
  [failure->info release];
  delete failure;
  [super dealloc];
}
- (NSInteger)code {
  return static_cast<Failure*>(_state)->code;
}
- (NSErrorDomain)domain {
  return static_cast<Failure*>(_state)->domain;
}
- (NSString*)localizedDescription {
  return [static_cast<Failure*>(_state)->info objectForKey:NSLocalizedDescriptionKey];
}
- (NSString*)description {
  return [self localizedDescription];
}
@end

void NSLog(NSString* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, [format UTF8String], arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
}
