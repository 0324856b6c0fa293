// The part of Foundation that Metal host code uses: strings, numbers, collections and errors.
#include <Foundation/Foundation.h>
#include <objc/runtime.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "object.h"

namespace {

struct Number {
  long long integer;
  double floating;
  bool is_floating;
};
using Objects = std::vector<id>;
Objects& objects_of(NSArray* array) {
  return *static_cast<Objects*>(array->_state);
}
using Entries =
    std::map<std::string, std::pair<id, id>>;  // maps a key's text to (key, value), because all keys here are strings
Entries& entries_of(NSDictionary* dictionary) {
  return *static_cast<Entries*>(dictionary->_state);
}

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

// The compiler uses this layout for @"..." literals.
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
  for (NSUInteger i = 0; i < count; ++i)
    objects_of(array).push_back([objects[i] retain]);
  return array;
}
- (id)init {
  _state = new Objects();
  return self;
}
- (void)dealloc {
  for (id object : objects_of(self))
    [object release];
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
  for (NSUInteger i = 0; i < count; ++i)
    set_entry(dictionary, keys[i], objects[i]);
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
  for (const auto& [text, entry] : entries_of(self))
    keys.push_back(entry.first);
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
