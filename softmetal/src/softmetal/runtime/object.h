// The memory of Objective-C objects, and the error for a broken rule of Metal.
#pragma once

#include <Foundation/Foundation.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace softmetal {

// Allocates a zeroed object with one reference. The reference count is stored before the object.
id create_instance(Class cls);
void free_instance(id object);

// A mistake for which Metal's API validation aborts the process on a Mac. In Python, the exception becomes
// RuntimeError.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws a Violation. `rule` names Metal's rule, and `parts` form the message.
template <typename... Parts>
[[noreturn]] void violation(const char* rule, const Parts&... parts) {
  std::ostringstream text;
  text << "Metal API violation [" << rule << "]: ";
  (text << ... << parts);
  throw Violation(text.str());
}

}  // namespace softmetal
