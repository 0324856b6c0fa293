// The root class for GNU libobjc: memory, reference counts and autorelease pools.
#include <Foundation/Foundation.h>
#include <objc/runtime.h>

#include <unwind.h>
#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "object.h"
#include "python_api.h"

extern "C" _Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class, _Unwind_Exception*,
                                                    _Unwind_Context*);
// C++ exceptions can pass through Objective-C++ frames of host code only with the C++ personality function. This
// library is loaded globally before libobjc, so this definition overrides the one in libobjc.
extern "C" __attribute__((visibility("default"))) _Unwind_Reason_Code
__gnu_objc_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class kind,
                          _Unwind_Exception* exception, _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, kind, exception, context);
}

namespace {

// Stored in memory before every object, because GNU libobjc's objects have no field for a reference count.
struct Header {
  std::atomic<NSUInteger> references;
  NSUInteger padding;
};
Header* header(id object) {
  return reinterpret_cast<Header*>(object) - 1;
}

struct Pools {
  std::vector<std::vector<id>> stack;
};
thread_local Pools pools;

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
void free_instance(id object) {
  std::free(header(object));
}
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

size_t softmetal_autorelease_pools() {
  return pools.stack.size();
}

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
  // An exception skips the drain of inner pools, so the outer pool also drains the inner pools.
  while (pools.stack.size() >= reinterpret_cast<size_t>(_state)) {
    const std::vector<id> objects = std::move(pools.stack.back());
    pools.stack.back().clear();
    for (id object : objects)
      [object release];
    if (pools.stack.back().empty()) pools.stack.pop_back();
  }
  [self dealloc];
}
- (oneway void)release {
  [self drain];
}
@end
