// Objects below Objective-C: their memory, and how a broken Metal rule is raised.
#pragma once

#include <Foundation/Foundation.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace softmetal {

// A zeroed object of the class with one reference. The count lies in front of the object.
id create_instance(Class cls);
void free_instance(id object);

// What Metal's API validation aborts a Mac's process for. Arrives in Python as RuntimeError.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Raises a Violation: `rule` names what Metal asks for, the rest says what came.
template <typename... Parts>
[[noreturn]] void violation(const char* rule, const Parts&... parts) {
  std::ostringstream text;
  text << "Metal API violation [" << rule << "]: ";
  (text << ... << parts);
  throw Violation(text.str());
}

}  // namespace softmetal
